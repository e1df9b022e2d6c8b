"""Building samplers from their config, and reusing a warm one where only the weights differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config.engines import AnySamplerConfig, VllmSamplerConfig, VllmServerSamplerConfig


def open_sampler(policy: Path, config: AnySamplerConfig, *, threads: int, transfer: str) -> Any:
    """Return a sampler of `policy`. `transfer` names vLLM's weight transfer backend, "" for host memory."""
    if isinstance(config, VllmSamplerConfig):
        from rlhf_core.sampling.vllm_sampler import VllmSampler

        return VllmSampler(policy, config, threads=threads, transfer=transfer)
    if isinstance(config, VllmServerSamplerConfig):
        from rlhf_core.sampling.vllm_server_sampler import VllmServerSampler

        return VllmServerSampler(policy, config)
    from rlhf_core.sampling.hf_sampler import HFSampler

    return HFSampler(policy, config)


def reopen_sampler(warm: Any, policy: Path, config: AnySamplerConfig, *, threads: int, transfer: str) -> Any:
    """Return `warm` with the weights of `policy` if it accepts them, else a new sampler in its place."""
    if warm is not None and warm.accepts(policy):
        warm.load_policy(policy)
        return warm
    if warm is not None:
        warm.close()
    return open_sampler(policy, config, threads=threads, transfer=transfer)
