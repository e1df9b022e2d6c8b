"""vLLM runs in two processes of its own: what happens in it, and whether a second one repeats the first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.sampling.hf_sampler import HFSampler, processed_logprobs
from tests.rlhf_core.sampling.vllm_program import REQUESTS, RESHAPED

pytestmark = [pytest.mark.engine, pytest.mark.slow]  # the first of them starts what all share
pytest.importorskip("vllm", reason="vLLM is not installed")

PROMPTS = [tuple(range(10, 13 + index % 7)) for index in range(24)]
Seen = dict[str, Any]


@pytest.fixture(scope="module")
def seen(vllm_processes: tuple[Seen, Seen]) -> Seen:
    return vllm_processes[0]


def test_the_engine_listens_on_the_loopback_alone_wherever_the_name_of_its_machine_leads(seen):
    assert seen["listening"] == ["127.0.0.1"]
    if not seen["renamed"]:
        pytest.skip("the machine's own name may lead to its loopback")


def test_vllm_is_imported_by_no_further_process_that_describes_the_model(vllm_processes, vllm_cache):
    assert not list(vllm_cache.glob("modelinfos/*"))  # such a process leaves the description there


def test_another_process_gives_bitwise_the_same_completions(vllm_processes):
    assert vllm_processes[0]["first"] == vllm_processes[1]["first"]


def test_the_same_requests_give_the_same_completions_again(seen):
    assert seen["first"] == seen["again"]
    assert len({tuple(completion["token_ids"]) for completion in seen["first"]}) == 24


@pytest.mark.parametrize(("name", "temperature"), [("first", 1.0), ("greedy", 1.0)])
def test_logprobs_agree_with_transformers(name, temperature, seen, policies):
    for expected, completion in zip(_transformers_logprobs(policies[0], seen[name], temperature), seen[name]):
        # 2e-3 is what the importance ratio of an unchanged policy may be off by; fp32 kernels are far below it.
        assert completion["logprobs"] == pytest.approx(expected, abs=2e-3)


def test_requests_that_join_while_others_are_sampled_get_the_same_tokens(seen):
    assert len(seen["advanced"]) == len(PROMPTS)
    assert list(seen["advanced"]) != sorted(seen["advanced"], key=int)  # short answers finish before long ones
    for number, completion in seen["advanced"].items():
        assert completion["token_ids"] == seen["first"][int(number)]["token_ids"]
        assert completion["logprobs"] == pytest.approx(seen["first"][int(number)]["logprobs"], abs=1e-4)


def test_what_is_still_being_sampled_is_dropped_by_the_next_batch(seen):
    assert [_content(one) for one in seen["after_advancing"]] == [_content(one) for one in seen["first"]]


def test_more_prompt_tokens_than_a_pass_takes_are_sampled_with_their_seeds(seen):
    assert seen["crowd"] == 120


def test_greedy_logprobs_are_the_largest(seen, policies):
    for prompt, completion in zip(PROMPTS, seen["greedy"], strict=True):
        logprobs_LV = _logprobs(policies[0], prompt, completion["token_ids"])
        assert logprobs_LV.argmax(-1).tolist() == completion["token_ids"]


def test_top_k_renormalises_over_the_tokens_that_are_left(seen, policies):
    for prompt, completion in zip(PROMPTS, seen["filtered"], strict=True):
        logprobs_LV = _logprobs(policies[0], prompt, completion["token_ids"], temperature=0.7)
        top_L5 = logprobs_LV.topk(5)
        for row, token, logprob in zip(range(24), completion["token_ids"], completion["logprobs"], strict=False):
            assert token in top_L5.indices[row]
            expected = logprobs_LV[row, token] - top_L5.values[row].logsumexp(-1)
            assert logprob == pytest.approx(expected.item(), abs=2e-3)


@pytest.mark.parametrize("name", [name for name, options in RESHAPED.items() if not options["temperature"]])
def test_penalties_and_stops_give_what_they_give_with_transformers(name, seen, policies):
    made = HFSampler(policies[0], HFSamplerConfig()).generate(REQUESTS, SamplingConfig(max_tokens=24, **RESHAPED[name]))
    assert [_content(one)[0] for one in seen["reshaped"][name]] != [_content(one)[0] for one in seen["greedy"]]
    for ours, theirs in zip(made, seen["reshaped"][name], strict=True):
        assert (list(ours.token_ids), ours.text, ours.finish_reason) == (
            theirs["token_ids"],
            theirs["text"],
            theirs["finish_reason"],
        )
        assert theirs["logprobs"] == pytest.approx(ours.logprobs, abs=2e-3)


def test_min_p_leaves_the_tokens_that_it_leaves_with_transformers(seen, policies):
    options = SamplingConfig(**RESHAPED["min_p"])
    for prompt, completion in zip(PROMPTS, seen["reshaped"]["min_p"], strict=True):
        logprobs_LV = processed_logprobs(_logprobs(policies[0], prompt, completion["token_ids"]), options)
        rows = torch.arange(len(completion["token_ids"]))
        assert completion["logprobs"] == pytest.approx(logprobs_LV[rows, completion["token_ids"]].tolist(), abs=2e-3)


def test_weights_from_memory_sample_exactly_like_their_policy(seen):
    reloaded = seen["reloads"]["from_memory"]
    assert [_content(c) for c in reloaded] == [_content(c) for c in seen["fresh_other"]]
    assert [_content(c) for c in reloaded] != [_content(c) for c in seen["first"]]
    assert {completion["policy_version"] for completion in reloaded} == {5}


def test_a_warm_engine_serves_the_next_policy_exactly_like_a_new_one(seen):
    assert seen["reloads"]["accepted"]
    assert seen["reloads"]["from_folder"] == seen["first"]  # back at version 0


def test_finish_reasons_and_texts_follow_the_stop_token(seen):
    completions = [c for name in ("first", "filtered", "fresh_other") for c in seen[name]]
    assert {c["finish_reason"] for c in completions} >= {"length"}
    for completion in completions:
        assert (completion["token_ids"][-1] == 4) == (completion["finish_reason"] == "stop")  # 4 is <|end|>
        assert 4 not in completion["token_ids"][:-1]
        assert len(completion["token_ids"]) == 24 or completion["finish_reason"] == "stop"
        assert "<|" not in completion["text"]


def test_refusals_say_what_to_do(seen):
    overlong, wrong_digest, too_many_positions = seen["errors"]
    assert "SamplingError: requests[0] (seed 100) = 97: 3 prompt tokens + max_tokens 94 exceed" in overlong
    assert "SamplingError: weights.digest" in wrong_digest
    assert "ConfigError: runtime.sampler.max_model_len = 97: the policy has 96 positions" in too_many_positions


def _content(completion: Seen) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return tuple(completion["token_ids"]), tuple(completion["logprobs"])


def _transformers_logprobs(policy: Path, completions: list[Seen], temperature: float) -> list[list[float]]:
    rows = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        logprobs_LV = _logprobs(policy, prompt, completion["token_ids"], temperature=temperature)
        rows.append(logprobs_LV.gather(-1, torch.tensor(completion["token_ids"])[:, None]).squeeze(-1).tolist())
    return rows


def _logprobs(policy: Path, prompt: tuple[int, ...], answer: list[int], *, temperature: float = 1.0) -> torch.Tensor:
    """Return `logprobs_LV` of the positions that predict the answer."""
    with torch.no_grad():
        logits_LV = _model(policy)(torch.tensor([[*prompt, *answer]])).logits[0]
    return (logits_LV[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


_MODELS: dict[Path, Any] = {}


def _model(policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    if policy not in _MODELS:
        _MODELS[policy] = AutoModelForCausalLM.from_pretrained(policy)
    return _MODELS[policy]
