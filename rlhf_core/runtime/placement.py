"""Which GPUs the workers get. On CPUs Ray reserves nothing: trainer and sampler take turns on the same cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_core.config.engines import AnySamplerConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError, explain

RESERVE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Placement:
    """Options of the Ray actors, one dictionary per worker. `group` is the placement group to free, None on CPUs."""

    train: tuple[dict[str, Any], ...]
    sample: tuple[dict[str, Any], ...]
    group: Any


def engine_count(sampler: AnySamplerConfig) -> int:
    """Return how many sampler processes there are."""
    return sampler.engines if isinstance(sampler, VllmSamplerConfig) else 1


def reserve(config: RuntimeConfig) -> Placement:
    """Return where the workers run; GPUs are reserved for all of them at once, packed on as few nodes as possible.

    Fractions of a GPU let a trainer and an engine share it. Raises ConfigError if the cluster has too few GPUs.
    """
    engines = engine_count(config.sampler)
    if config.gpus_per_train_worker == 0 and config.gpus_per_engine == 0:
        idle: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0}
        return Placement(train=(idle,) * config.train_workers, sample=(idle,) * engines, group=None)
    _check_gpus(config, engines)
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    sizes = [config.gpus_per_train_worker] * config.train_workers + [config.gpus_per_engine] * engines
    group = placement_group([{"CPU": 1, **({"GPU": gpus} if gpus else {})} for gpus in sizes], strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=RESERVE_TIMEOUT_S)
    if not ready:
        ray.util.remove_placement_group(group)  # or it would stay queued, and take the GPUs from the next attempt
        rule = f"{sum(sizes):g} GPUs and {len(sizes)} CPUs were not free within {RESERVE_TIMEOUT_S:g} s"
        raise ConfigError(explain("runtime.train_workers", config.train_workers, rule, "wait for, or ask for fewer"))
    options = tuple(
        {
            "num_cpus": 1,
            "num_gpus": gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        }
        for index, gpus in enumerate(sizes)
    )
    return Placement(train=options[: config.train_workers], sample=options[config.train_workers :], group=group)


def _check_gpus(config: RuntimeConfig, engines: int) -> None:
    import ray

    sampler = config.sampler
    if isinstance(sampler, VllmSamplerConfig) and sampler.tensor_parallel > max(1.0, config.gpus_per_engine):
        rule = f"runtime.gpus_per_engine = {config.gpus_per_engine:g} is less"
        remedy = "give each engine as many GPUs"
        raise ConfigError(explain("runtime.sampler.tensor_parallel", sampler.tensor_parallel, rule, remedy))
    needed = config.gpus_per_train_worker * config.train_workers + config.gpus_per_engine * engines
    resources = ray.cluster_resources()
    there = float(resources["GPU"]) if "GPU" in resources else 0.0
    if needed > there:
        raise ConfigError(
            explain(
                "runtime.gpus_per_train_worker, gpus_per_engine",
                (config.gpus_per_train_worker, config.gpus_per_engine),
                f"{needed:g} GPUs are needed, the cluster has {there:g}",
                "use fewer workers, or 0 GPUs to run on CPUs",
            )
        )
