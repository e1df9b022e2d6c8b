from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.errors import ConfigError, SamplingError
from rlhf_core.sampling.requests import check_logprobs, check_requests, finish_reason, stop_token_ids
from rlhf_core.types import SamplingRequest


def check(*prompts: tuple[int, ...], max_tokens: int = 4) -> None:
    requests = [SamplingRequest(prompt, seed=50 + index) for index, prompt in enumerate(prompts)]
    check_requests(requests, vocab_size=10, max_tokens=max_tokens, max_model_len=8)


def test_a_request_may_fill_the_model_length_exactly() -> None:
    check((1, 2, 3, 4), (9,), max_tokens=4)  # 4 + 4 = 8
    with pytest.raises(SamplingError, match="exceed"):
        check((1, 2, 3, 4), (9,), max_tokens=5)


def test_an_overlong_request_is_named_with_its_seed_and_lengths() -> None:
    with pytest.raises(
        SamplingError, match=r"requests\[1\] \(seed 51\) = 9: 5 prompt tokens \+ max_tokens 4 exceed .* 8"
    ):
        check((1,), (1, 2, 3, 4, 5))


@pytest.mark.parametrize(("prompt", "message"), [((), "no tokens"), ((3, 10), r"\[0, 10\)"), ((-1,), r"\[0, 10\)")])
def test_a_prompt_that_the_policy_cannot_read_is_refused(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        check(prompt)


def test_log_probabilities_of_a_diverged_policy_are_refused() -> None:
    check_logprobs(SamplingRequest((1,), seed=5), (-0.5, 0.0))
    with pytest.raises(SamplingError, match=r"seed 5.*diverged"):
        check_logprobs(SamplingRequest((1,), seed=5), (-0.5, float("nan")))


def test_stop_tokens_are_those_of_the_model_and_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert stop_token_ids(tmp_path, tokenizer_eos=5) == (2, 5, 7)


def test_a_policy_without_any_stop_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        stop_token_ids(tmp_path, tokenizer_eos=None)


def test_an_answer_stops_only_on_a_stop_token() -> None:
    assert (finish_reason(2, (2, 5)), finish_reason(3, (2, 5))) == ("stop", "length")


def test_a_request_that_asks_for_fewer_tokens_needs_less_room() -> None:
    request = SamplingRequest((1, 2, 3, 4, 5), seed=50, max_tokens=3)
    check_requests([request], vocab_size=10, max_tokens=4, max_model_len=8)  # 5 + 3 = 8
