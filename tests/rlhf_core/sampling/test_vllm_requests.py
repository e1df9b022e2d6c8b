"""What `VllmSampler` asks of its engine, seen from an engine that only writes it down; vLLM itself is not needed."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.runtime import VllmSamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import Adapters, Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling import vllm_sampler
from rlhf_core.sampling.vllm_sampler import VllmSampler
from rlhf_core.types import SamplingRequest

REQUESTS = [SamplingRequest((10, 11), seed=1), SamplingRequest((10, 11), seed=2)]


class Engine:
    """vLLM's `LLM` as far as it is used, sampling token 12 all the time."""

    def __init__(self) -> None:
        self.prompts: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.experts: np.ndarray | None = None
        self.llm_engine = SimpleNamespace(abort_request=lambda names: self.calls.append("abort"))

    def generate(
        self, prompts: list[dict[str, Any]], params: list[Any], *, use_tqdm: bool, lora_request: None
    ) -> list[Any]:
        self.prompts += prompts
        self.calls.append("generate")
        drawn = {"token_ids": (12,), "logprobs": [{12: SimpleNamespace(logprob=-0.5)}]}
        output = SimpleNamespace(**drawn, routed_experts=self.experts)
        return [SimpleNamespace(outputs=[output], request_id=str(number)) for number in range(len(prompts))]

    def collective_rpc(self, method: str, **arguments: Any) -> list[Any]:
        self.calls.append(method)
        return [{}] if method == "take_experts" else []

    def sleep(self, *, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append("wake " + " ".join(tags))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")


def opened(policy: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[VllmSampler, Engine]:
    engine = Engine()
    monkeypatch.setattr(vllm_sampler, "_start_engine", lambda *_, **__: engine)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # which the sampler changes for the imports of vLLM
    monkeypatch.setattr(VllmSampler, "_sampling_params", lambda *_: None)
    return VllmSampler(policy, VllmSamplerConfig(max_model_len=96, **fields), threads=1, transfer=""), engine


def salts(engine: Engine) -> list[str]:
    found = [prompt["cache_salt"] for prompt in engine.prompts]
    engine.prompts.clear()
    return found


def test_prefixes_are_salted_anew_whenever_the_weights_change(policies, monkeypatch):
    sampler, engine = opened(policies[0], monkeypatch, prefix_caching=True)
    seen = []

    def sample() -> None:
        sampler.generate(REQUESTS, SamplingConfig(max_tokens=1))
        (salt,) = set(salts(engine))  # what the requests have in common is shared
        seen.append(salt)

    sample()
    sample()
    sampler.load_policy(policies[1])  # back at version 0
    sample()
    sampler.transfer("finish", {})
    sample()
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3
    assert engine.calls.count("reset_prefix_cache") == 2


def test_without_prefix_caching_nothing_is_salted(policies, monkeypatch):
    sampler, engine = opened(policies[0], monkeypatch)
    sampler.generate(REQUESTS, SamplingConfig(max_tokens=1))
    assert engine.prompts == [{"prompt_token_ids": [10, 11]}] * 2


def test_experts_that_vllm_returns_are_kept_and_no_prompt_finds_the_prefix_of_another(policies, monkeypatch):
    sampler, engine = opened(policies[0], monkeypatch, routed_experts=True)
    engine.experts = np.array([[[3, 0]], [[1, 2]]], np.uint8)  # of the prompt; the token that is drawn is not read
    asking = [replace(one, routed_experts=True) for one in REQUESTS]
    done = sampler.generate(asking, SamplingConfig(max_tokens=1))
    assert [one.routed_experts for one in done] == [(3, 0, 1, 2, -1, -1)] * 2
    assert len(set(salts(engine))) == 2


def test_an_engine_falls_asleep_once_and_not_while_it_samples(policies, monkeypatch):
    sampler, engine = opened(policies[0], monkeypatch, sleep=True)
    sampler.wake()
    sampler.sleep()
    sampler.sleep()
    sampler.wake()
    before = ["sleep 1", "wake weights kv_cache"]
    assert engine.calls == before
    sampler._sampled["advance-0"] = (0, REQUESTS[0])  # as between two calls of `advance`
    sampler.sleep()
    sampler.wake()
    assert engine.calls == before
    sampler.generate(REQUESTS, SamplingConfig(max_tokens=1))
    sampler.sleep(keep_weights=False)
    for kv_cache in (False, False, True, True):
        sampler.wake(kv_cache=kv_cache)
    assert engine.calls == [*before, "abort", "generate", "sleep 2", "wake weights", "wake kv_cache"]


def test_adapters_of_a_policy_that_the_engine_does_not_have_are_refused(policies, monkeypatch):
    sampler, engine = opened(policies[0], monkeypatch, lora_sync="adapter")
    sent = Weights({}, weights_digest({}), Adapters("elsewhere", LoraConfig()))
    with pytest.raises(
        SamplingError, match="the adapters change the weights of elsewhere, which the engine does not have"
    ):
        sampler.load_weights(sent, version=1)
    assert engine.calls == []
