"""Open the `Runtime` of a configuration; run engines in this process, for tests and machines too small for Ray."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import EngineSampler, ModelSpec, Role, Runtime, Sampler, T, Trainer
from rlhf_core.runtime.cluster import available_cores, threads_per_worker, trainer_versions
from rlhf_core.runtime.samplers import reopen_sampler


def open_runtime(config: RuntimeConfig) -> Runtime:
    """Open the runtime that `config.type` names. Nothing starts before the first lease or `prewarm`."""
    if config.type == "local":
        return LocalRuntime(config)
    from rlhf_core.runtime.ray_runtime import RayRuntime  # imports Ray

    return RayRuntime(config)


class LocalRuntime:
    """A `Runtime` without workers: one trainer per lease, one sampler at a time, both in the calling process.

    >>> runtime = LocalRuntime(RuntimeConfig(type="local", sampler=HFSamplerConfig()))   # doctest: +SKIP
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._sampler: EngineSampler | None = None
        self._sampler_leased = False
        self._served: dict[str, str] = {}

    @contextlib.contextmanager
    def trainer(self, role: Role, model: ModelSpec, optimizer: OptimizerConfig | None) -> Iterator[Trainer]:
        """Load `model`, with an optimizer if it is to be trained; it is freed at the end of the `with` block."""
        from rlhf_core.training.trainer import LocalTrainer  # torch and transformers, which sampling may not need

        config = self._config.of(role).trainer
        self._served.update(trainer_versions(config))
        alone = self._config.sampler.needs().adapters
        with contextlib.closing(LocalTrainer(model, optimizer, config, adapters_alone=alone)) as trainer:
            yield trainer

    @contextlib.contextmanager
    def sampler(self, policy: Path) -> Iterator[Sampler]:
        """Lease a sampler of `policy`, version 0; an engine that only needs other weights is reused."""
        if self._sampler_leased:
            raise SamplingError(
                "sampler", str(policy), "the engine is already leased", "leave the other `with` block first"
            )
        threads = threads_per_worker(self._config, cores=available_cores())
        warm, self._sampler = self._sampler, None  # not kept if opening fails
        opened = reopen_sampler(warm, policy, self._config.sampler, threads=threads, transfer="")
        self._sampler = opened
        self._served.update(opened.versions())
        self._sampler_leased = True
        try:
            yield opened
        finally:
            self._sampler_leased = False

    def together(self, *work: Callable[[], T]) -> list[T]:
        """Make the calls one after the other, and collect their results."""
        return [one() for one in work]

    def prewarm(self, *, trainer: bool, sampler: bool) -> None:
        """Do nothing: importing here would block the caller."""

    def engines(self) -> dict[str, str]:
        """Map name -> version of the engines that served a lease."""
        return dict(self._served)

    def close(self) -> None:
        """Free the sampler."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
