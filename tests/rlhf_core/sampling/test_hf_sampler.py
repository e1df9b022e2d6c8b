import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import HFSamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.models.lora import weights_digest
from rlhf_core.sampling.hf_sampler import HFSampler, inverse_cdf, penalized, processed_logprobs
from rlhf_core.types import Completion, SamplingRequest
from tests.rlhf_core.conftest import TINY
from tests.support.tolerances import near, of_model

REQUESTS = [SamplingRequest(tuple(range(10, 13 + index)), seed=100 + index) for index in range(6)]
SAMPLING = SamplingConfig(max_tokens=12)


@pytest.fixture(scope="module")
def sampler(policies: tuple[Path, Path]) -> HFSampler:
    return HFSampler(policies[0], HFSamplerConfig(batch_size=4))


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def test_a_request_gets_the_same_tokens_in_any_company(sampler):
    together = sampler.generate(REQUESTS, SAMPLING)
    alone = [sampler.generate([request], SAMPLING)[0] for request in REQUESTS]
    assert tokens(together) == tokens(alone)
    for one, other in zip(together, alone, strict=True):
        assert one.logprobs == near(other.logprobs, of_model(TINY))


def test_the_seed_decides_the_completion(sampler):
    first, again, other = (sampler.generate([SamplingRequest((10, 11), seed=seed)], SAMPLING)[0] for seed in (1, 1, 2))
    assert first == again
    assert first.token_ids != other.token_ids


def test_logprobs_are_those_of_the_sampled_tokens(sampler, policies):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policies[0])
    request = REQUESTS[3]
    completion = sampler.generate([request], SamplingConfig(max_tokens=12, temperature=0.7))[0]
    sequence = torch.tensor([request.prompt_ids + completion.token_ids])
    with torch.no_grad():
        logprobs = (model(sequence).logits[0] / 0.7).log_softmax(-1)
    start = len(request.prompt_ids) - 1
    expected = [logprobs[start + index, token].item() for index, token in enumerate(completion.token_ids)]
    assert completion.logprobs == near(tuple(expected), of_model(TINY))


def test_greedy_takes_the_most_likely_token_whatever_the_seed(sampler):
    greedy = SamplingConfig(max_tokens=6, temperature=0)
    first, other = (sampler.generate([replace(REQUESTS[0], seed=seed)], greedy)[0] for seed in (1, 2))
    assert first.token_ids == other.token_ids
    only_one = sampler.generate([REQUESTS[0]], SamplingConfig(max_tokens=6, top_k=1))[0]
    assert only_one.token_ids == first.token_ids
    assert only_one.logprobs == (0.0,) * len(only_one.token_ids)  # one token is left, with probability 1


def test_temperature_then_top_k_then_top_p():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    # Temperature 1/2 squares: 0.25 : 0.09 : 0.0225 : 0.0025. Top-k 3 drops the last; the others sum to 0.3625, so the
    # first holds 0.69 of them: top-p 0.6 keeps it alone, top-p 0.7 the first two.
    config = SamplingConfig(temperature=0.5, top_k=3, top_p=0.7)
    assert processed_logprobs(logits, config).exp().tolist()[0] == pytest.approx([0.25 / 0.34, 0.09 / 0.34, 0, 0])
    config = SamplingConfig(temperature=0.5, top_k=3, top_p=0.6)
    assert processed_logprobs(logits, config).exp().tolist()[0] == pytest.approx([1, 0, 0, 0])


def test_min_p_keeps_tokens_by_their_part_of_the_likeliest_after_the_temperature():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for temperature, expected in ((1.0, [0.625, 0.375, 0, 0]), (0.5, [1, 0, 0, 0])):  # 0.09 < 0.5 * 0.25
        config = SamplingConfig(temperature=temperature, min_p=0.5)
        assert processed_logprobs(logits, config).exp().tolist()[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({"repetition_penalty": 2.0}, [1.0, -4.0, 1.5, 0.5]),  # 0 and 1 are in the prompt, 2 twice in the answer
        ({"presence_penalty": 0.5}, [2.0, -2.0, 2.5, 0.5]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 2.0, 0.5]),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.5}, [1.0, -4.0, 0.0, 0.5]),
    ],
)
def test_penalties_count_the_answer_and_repetition_the_prompt_too(penalties, expected):
    logits = torch.tensor([[2.0, -2.0, 3.0, 0.5]] * 2)
    found = penalized(logits, [[0, 1], [3]], [[2, 2], []], SamplingConfig(**penalties))
    assert found[0].tolist() == expected and found[1, :3].tolist() == [2.0, -2.0, 3.0]


def test_a_large_presence_penalty_leaves_no_token_twice_and_the_logprobs_are_those_it_was_drawn_with(sampler):
    plain = sampler.generate(REQUESTS, SamplingConfig(max_tokens=12, temperature=0.0))
    made = sampler.generate(REQUESTS, SamplingConfig(max_tokens=12, temperature=0.0, presence_penalty=2.0))
    assert all(len(set(one.token_ids)) == len(one.token_ids) for one in made)
    assert [one.token_ids[0] for one in made] == [one.token_ids[0] for one in plain]
    alone = sampler.generate(REQUESTS[:1], SamplingConfig(max_tokens=12, temperature=0.0, presence_penalty=2.0))
    assert alone[0].token_ids == made[0].token_ids


def test_an_answer_is_cut_after_the_token_that_completes_a_text(sampler):
    whole = sampler.generate(REQUESTS, SAMPLING)
    stop = whole[0].text[3:5]
    for one, before in zip(
        sampler.generate(REQUESTS, SAMPLING.model_copy(update={"stop": ("never", stop)})), whole, strict=True
    ):
        assert (
            one.token_ids == before.token_ids[: len(one.token_ids)]
            and one.logprobs == before.logprobs[: len(one.logprobs)]
        )
        assert (stop in one.text) == (stop in before.text)
        if stop in before.text:
            assert one.finish_reason == "stop" and one.text.index(stop) == before.text.index(stop)
        else:
            assert one == before
    assert stop in whole[0].text


def test_a_uniform_picks_the_token_whose_interval_holds_it():
    logprobs = torch.tensor([0.25, 0.0, 0.75]).log().repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.9999], dtype=torch.float64)
    assert inverse_cdf(logprobs, uniforms).tolist() == [0, 0, 2, 2]  # a token of probability 0 is never drawn


def test_an_answer_ends_at_the_stop_token_which_its_text_leaves_out(sampler):
    stop = 4  # <|end|>, the fifth special token
    long = [SamplingRequest((10, 11, 12), seed=seed) for seed in range(64)]
    completions = sampler.generate(long, SamplingConfig(max_tokens=80))
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    assert 0 < len(stopped) < 64
    for completion in completions:
        assert (completion.token_ids[-1] == stop) == (completion.finish_reason == "stop")
        assert stop not in completion.token_ids[:-1]
        assert "<|" not in completion.text
    assert {len(c.token_ids) for c in completions if c.finish_reason == "length"} == {80}


def test_new_weights_sample_like_the_policy_they_came_from(policies):
    sampler = HFSampler(policies[0], HFSamplerConfig())
    before = sampler.generate(REQUESTS, SAMPLING)
    payload = load_file(policies[1] / "model.safetensors")
    sampler.load_weights(Weights(payload, weights_digest(payload)), version=3)
    after = sampler.generate(REQUESTS, SAMPLING)
    expected = HFSampler(policies[1], HFSamplerConfig()).generate(REQUESTS, SAMPLING)
    assert tokens(after) == tokens(expected) != tokens(before)
    assert {completion.policy_version for completion in after} == {3}


def test_weights_that_are_not_what_was_sent_are_refused(policies):
    sampler = HFSampler(policies[0], HFSamplerConfig())
    payload = load_file(policies[1] / "model.safetensors")
    with pytest.raises(SamplingError, match="the trainer sent 0000"):
        sampler.load_weights(Weights(payload, "0000"), version=1)
    del payload["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(SamplingError, match="up_proj"):
        sampler.load_weights(Weights(payload, weights_digest(payload)), version=1)


def test_a_request_may_ask_for_fewer_tokens_and_gets_the_beginning_of_its_answer(sampler):
    whole = sampler.generate(REQUESTS, SAMPLING)
    cut = [replace(request, max_tokens=1 + index) for index, request in enumerate(REQUESTS)]
    for index, (one, other) in enumerate(zip(sampler.generate(cut, SAMPLING), whole, strict=True)):
        assert one.token_ids == other.token_ids[: 1 + index]
    more = replace(REQUESTS[0], max_tokens=40)
    assert len(sampler.generate([more], SAMPLING)[0].token_ids) <= 12  # the configuration's limit stays


def test_advancing_answers_what_is_new(sampler):
    finished = sampler.advance([(7, REQUESTS[1]), (9, REQUESTS[0])], SAMPLING)
    assert [number for number, _ in finished] == [7, 9]
    assert tokens([completion for _, completion in finished]) == tokens(sampler.generate(REQUESTS[1::-1], SAMPLING))


SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("family", ["gpt_neox", "qwen3_moe", "bloom"])
def test_weights_arrive_under_the_names_of_the_files_of_their_family(tmp_path, policies, family):
    from transformers import AutoModelForCausalLM, BloomConfig, GPTNeoXConfig, Qwen3MoeConfig

    config = {
        "gpt_neox": lambda: GPTNeoXConfig(**SMALL),
        "qwen3_moe": lambda: Qwen3MoeConfig(
            **SMALL, head_dim=8, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
        ),
        "bloom": lambda: BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2),
    }[family]()
    shutil.copytree(policies[0], tmp_path / "policy", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "policy")
    sampler = HFSampler(tmp_path / "policy", HFSamplerConfig(batch_size=4))
    attention = sampler._model.config._attn_implementation
    assert attention == ("eager" if family == "bloom" else "sdpa"), (
        "Bloom has no other attention, whatever a profile sets"
    )
    sent = {name: tensor * 2 for name, tensor in load_file(tmp_path / "policy" / "model.safetensors").items()}
    sampler.load_weights(Weights(sent, weights_digest(sent)), version=1)
    for name, parameter in sampler._model.named_parameters():
        assert torch.equal(parameter, 2 * model.get_parameter(name)), name
    more = sent | {"another.weight": torch.zeros(2)}
    with pytest.raises(SamplingError, match=r"another\.weight"):
        sampler.load_weights(Weights(more, weights_digest(more)), version=2)
    less = dict(list(sent.items())[1:])
    with pytest.raises(SamplingError, match="do not match the policy"):
        sampler.load_weights(Weights(less, weights_digest(less)), version=2)
