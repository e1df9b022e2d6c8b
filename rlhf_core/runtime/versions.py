"""Read the versions of the engines that train, in the worker that runs them."""

from __future__ import annotations

from importlib.metadata import version

from rlhf_core.config.engines import TrainerConfig


def trainer_versions(config: TrainerConfig) -> dict[str, str]:
    """Return name -> version of the training libraries: torch, transformers and, if it is the engine, DeepSpeed."""
    engines = ("deepspeed",) if config.engine == "deepspeed" else ()
    return {name: version(name) for name in ("torch", "transformers", *engines)}
