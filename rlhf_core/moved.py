"""Let the former name of a module that moved work for one release, with a warning."""

import sys
import warnings
from importlib import import_module
from pkgutil import iter_modules

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
    "rlhf_core.models.sizes": "rlhf_contrib.planner.sizes",
    "rlhf_core.rewards.library.code": "rlhf_contrib.sandbox.code",
    "rlhf_core.rewards.sandbox": "rlhf_contrib.sandbox",
    "rlhf_core.rewards.server": "rlhf_contrib.serve.reward_server",
    "rlhf_core.runtime.jobs": "rlhf_contrib.ray_jobs.jobs",
    "rlhf_core.sampling.vllm_server_sampler": "rlhf_contrib.vllm_server.sampler",
    "rlhf_core.training.memory": "rlhf_contrib.planner.memory",
    "stages.config": "stages",
}
"""Former name of a module, or of a package with its modules -> the present one. 0.4 refuses the former names."""


def moved(former: str) -> None:
    """Make the module `former`, which is being imported, the module that has its code now, with the modules below it.

    A former name gives the same module object, so that classes are equal under both names.
    """
    present = MOVED[former]
    _warn(former, stacklevel=4)
    sys.modules[former] = module = import_module(present)
    for inner in iter_modules(getattr(module, "__path__", ())):
        sys.modules[f"{former}.{inner.name}"] = import_module(f"{present}.{inner.name}")


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
