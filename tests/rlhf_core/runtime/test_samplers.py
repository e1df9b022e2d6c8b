from __future__ import annotations

from pathlib import Path

from rlhf_core.config.engines import HFSamplerConfig, SamplingConfig
from rlhf_core.runtime.samplers import open_sampler, reopen_sampler
from rlhf_core.types import SamplingRequest

REQUESTS = [SamplingRequest((10, 11, 12), seed=seed) for seed in range(3)]


def test_reopening_serves_the_next_policy_and_frees_the_last(policies: tuple[Path, Path]) -> None:
    config = HFSamplerConfig()
    first = open_sampler(policies[0], config, threads=1, transfer="")
    second = reopen_sampler(first, policies[1], config, threads=1, transfer="")
    direct = open_sampler(policies[1], config, threads=1, transfer="")
    sampling = SamplingConfig(max_tokens=6)
    assert second.generate(REQUESTS, sampling) == direct.generate(REQUESTS, sampling)
    assert first._model is None
