"""Let former names of modules, and of what moved between modules, work for one release, with a warning."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

MOVED = {
    "pipelines.cli.estimate_verb": "rlhf_contrib.planner.verb",
    "pipelines.cli.import_openrlhf": "rlhf_contrib.openrlhf.verb",
    "pipelines.cli.scaffold_verb": "rlhf_contrib.places.verb",
    "pipelines.cli.serve_reward": "rlhf_contrib.serve.reward_verb",
    "pipelines.cli.sweep_verb": "rlhf_contrib.sweep.verb",
    "pipelines.execution.estimate": "rlhf_contrib.planner.estimate",
    "pipelines.execution.hardware": "rlhf_contrib.planner.hardware",
    "pipelines.execution.job": "rlhf_contrib.ray_jobs.job",
    "pipelines.execution.ray_job": "rlhf_contrib.ray_jobs.executor",
    "pipelines.execution.stage_models": "rlhf_contrib.planner.stage_models",
    "pipelines.execution.sweep": "rlhf_contrib.sweep.points",
    "pipelines.importers.openrlhf": "rlhf_contrib.openrlhf",
    "rlhf_core.data.worlds": "rlhf_contrib.worlds",
    "rlhf_core.integrations.nemo_gym": "rlhf_contrib.environments.nemo_gym",
    "rlhf_core.integrations.openenv": "rlhf_contrib.environments.openenv",
    "rlhf_core.integrations.openrlhf": "rlhf_contrib.openrlhf.agent",
    "rlhf_core.integrations.verifiers": "rlhf_contrib.environments.verifiers",
    "rlhf_core.integrations.verifiers_runner": "rlhf_contrib.environments.verifiers_runner",
    "rlhf_core.models.sizes": "rlhf_contrib.planner.sizes",
    "rlhf_core.rewards.library.code": "rlhf_contrib.sandbox.code",
    "rlhf_core.rewards.sandbox": "rlhf_contrib.sandbox",
    "rlhf_core.rewards.server": "rlhf_contrib.serve.reward_server",
    "rlhf_core.runtime.jobs": "rlhf_contrib.ray_jobs.jobs",
    "rlhf_core.sampling.vllm_server_sampler": "rlhf_contrib.vllm_server.sampler",
    "rlhf_core.store.failures": "rlhf_core.stage.failures",
    "rlhf_core.training.memory": "rlhf_contrib.planner.memory",
    "stages.config": "stages",
}
"""Former name of a module, or of a package with its modules -> the present one. 0.4 refuses the former names."""
MOVED_NAMES = {
    "rlhf_core.config.engines": {
        "rlhf_core.config.models": "ALL_LINEAR BaseModelConfig GIVEN_TO_TEMPLATES InitModel PretrainedModel",
        "rlhf_core.config.runtime": "AnySamplerConfig HFSamplerConfig PoolConfig PoolRole RuntimeConfig SamplerConfig Url "
        "VllmSamplerConfig VllmServerSamplerConfig dtype_of_gpus",
    },
    "rlhf_core.data.chat": {"rlhf_core.data.pieces": "ANCHORS MARKS encode token_text"},
    "rlhf_core.models.loading": {"rlhf_core.models.materialize": "PAD_CANDIDATES materialize with_variables"},
    "rlhf_core.rewards.judge": {"rlhf_core.rewards.verdicts": "find_verdict"},
    "rlhf_core.store.fingerprint": {
        "rlhf_core.stage.code": "module_digests",
        "rlhf_core.user_code.syntax": "functions_of imported_names parse_source top_level_names",
    },
    "rlhf_core.store.records": {"rlhf_core.stage.versions": "environment other_versions versions"},
}
"""Module -> modules that have names of it now -> these names. Each calls `moved_names`. 0.4 refuses them there."""


def moved(former: str) -> None:
    """Make the module `former`, which is being imported, the module that has its code now, with the modules below it.

    A former name gives the same module object, so that classes are equal under both names.
    """
    present = MOVED[former]
    _warn(former, stacklevel=4)
    sys.modules[former] = module = import_module(present)
    for inner in iter_modules(getattr(module, "__path__", ())):
        sys.modules[f"{former}.{inner.name}"] = import_module(f"{present}.{inner.name}")


def moved_names(former: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module: names that it has lost to other modules, with one warning each."""
    places = {name: present for present, names in MOVED_NAMES[former].items() for name in names.split()}

    def moved_name(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {former!r} has no attribute {name!r}")
        text = f"{former}.{name} is now {places[name]}.{name}; the former name works until 0.4"
        warnings.warn(text, FutureWarning, stacklevel=2)
        value = getattr(import_module(places[name]), name)
        setattr(sys.modules[former], name, value)
        return value

    return moved_name


def present_module(name: str) -> str:
    """The present name of a module that a configuration names, with a warning for a former one.

    >>> present_module("my_rewards.length")
    'my_rewards.length'
    """
    for former, present in MOVED.items():
        if name == former or name.startswith(f"{former}."):
            _warn(former)
            return present + name.removeprefix(former)
    return name


def _warn(former: str, stacklevel: int = 2) -> None:
    text = f"{former} is now {MOVED[former]}; the former name works until 0.4"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)
