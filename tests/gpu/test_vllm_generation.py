"""vLLM on a GPU: its log-probabilities against transformers, and seeds."""

from pathlib import Path

import pytest
import torch

from rlhf_core.config.engines import RuntimeConfig, SamplingConfig, TrainerConfig, VllmSamplerConfig
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.types import Completion, SamplingRequest

REQUESTS = [SamplingRequest(tuple(range(10, 13 + index % 5)), seed=index) for index in range(16)]


def generate(policy: Path, sampling: SamplingConfig, *, times: int) -> list[list[Completion]]:
    sampler = VllmSamplerConfig(max_model_len=96, gpu_memory_fraction=0.3)
    runtime = RayRuntime(RuntimeConfig(gpus_per_engine=1, trainer=TrainerConfig(engine="torch"), sampler=sampler))
    try:
        with runtime.sampler(policy) as handle:
            return [handle.generate(REQUESTS, sampling) for _ in range(times)]
    finally:
        runtime.close()


def test_logprobs_agree_with_transformers(policy):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy)
    (completions,) = generate(policy, SamplingConfig(max_tokens=16), times=1)
    for request, completion in zip(REQUESTS, completions, strict=True):
        with torch.no_grad():
            logits_LV = model(torch.tensor([request.prompt_ids + completion.token_ids])).logits[0]
        logprobs_LV = logits_LV[len(request.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs_LV.gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1).tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-2)  # fp32 with GPU kernels


def test_the_same_seeds_give_the_same_tokens(policy):
    first, again = generate(policy, SamplingConfig(max_tokens=16), times=2)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert len({c.token_ids for c in first}) == 16
