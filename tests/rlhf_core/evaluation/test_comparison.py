"""Rows and comparisons of policies against numbers worked out by hand."""

import math

import pytest

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.comparison import Answers, best_of, improvement, summary, win_rate
from rlhf_core.types import ActionSpan, Completion, Generation, Message, Prompt

LEVEL = 0.95


def generation(prompt: str, tokens: tuple[int, ...] = (1, 2, 3), *, cut: bool = False) -> Generation:
    completion = Completion(tokens, (-0.5,) * len(tokens), "text", "length" if cut else "stop", 0, 0)
    return Generation(Prompt(prompt, (Message("user", prompt),), "", "test"), (9,), completion)


def test_a_row_by_hand():
    answers = Answers(
        "ppo",
        "digest",
        (generation("a"), generation("a", (1, 2, 3, 1, 2, 3)), generation("b", (4, 5, 6), cut=True)),
        gold=(1.0, 3.0, 5.0),
        scores=(0.0, 0.0, 1.0),
        log_ratios=(0.0, 2.0, 4.0),
    )
    row = summary(answers, level=LEVEL)
    assert (row["prompts"], row["samples"]) == (2, 3)
    assert row["gold"]["mean"] == 3.5  # prompt a: 2, prompt b: 5
    assert row["reward_model"]["mean"] == 0.5
    assert row["kl"]["mean"] == 2.5  # prompt a: 1, prompt b: 4
    assert row["kl"]["kind"] == "estimate"
    assert row["kl_per_token"] == 6 / 12
    assert row["tokens"]["mean"] == 3.75  # prompt a: 4.5, prompt b: 3
    assert row["truncated"]["mean"] == 0.5
    assert row["entropy"] == 0.5
    assert row["repetition"] == pytest.approx(0.25 / 3)  # 123 231 312 123 of the second answer alone
    assert row["distinct_2"] == 5 / 9  # 12 23 | 12 23 31 12 23 | 45 56


def test_of_an_episode_only_the_sampled_tokens_are_counted():
    ids, spans = (1, 2, 9, 9, 9, 9, 1, 3), (ActionSpan(0, 2, 0), ActionSpan(6, 8, 0))
    logprobs = (-0.5, -0.5, 0.0, 0.0, 0.0, 0.0, -0.5, -0.5)
    episode = Generation(generation("a").prompt, (8,), Completion(ids, logprobs, "text", "stop", 0, 0, spans))
    row = summary(Answers("ppo", "d", (episode,), log_ratios=(2.0,), failed=3), level=LEVEL)
    assert (row["tokens"]["mean"], row["kl_per_token"], row["entropy"]) == (4.0, 0.5, 0.5)
    assert (row["repetition"], row["distinct_2"]) == (0.0, 1.0)  # 121 213; 12 21 13
    assert row["failed"] == 3


def test_what_was_not_measured_is_left_out():
    row = summary(Answers("sft", "d", (generation("a"),)), level=LEVEL)
    assert not {"gold", "reward_model", "kl", "kl_per_token", "failed"} & set(row)


def test_best_of_n_takes_what_the_reward_model_likes_and_reports_its_gold():
    answers = Answers(
        "sft",
        "d",
        tuple(generation(prompt) for prompt in "aaabbb"),
        gold=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0),
        scores=(0.1, 0.9, 9.9, 0.5, 0.4, 9.9),  # the third answers are beyond n
    )
    picked = best_of(answers, 2, kl_bound=0.19)
    assert picked.name == "best-of-2 (sft)"
    assert picked.gold == (2.0, 4.0)
    assert summary(picked, level=LEVEL)["kl"] == {"mean": 0.19, "low": 0.19, "high": 0.19, "kind": "bound"}
    assert "kl" not in summary(best_of(answers, 2, kl_bound=math.nan), level=LEVEL)


def test_best_of_more_than_there_are_is_refused():
    answers = Answers("sft", "d", (generation("a"), generation("a"), generation("b")), scores=(1.0, 2.0, 3.0))
    with pytest.raises(ConfigError, match="a prompt has only 1 answers"):
        best_of(answers, 2, kl_bound=0.0)
    with pytest.raises(ConfigError, match="needs a reward model"):
        best_of(Answers("sft", "d", (generation("a"),)), 1, kl_bound=0.0)


def test_wins_are_counted_per_prompt_over_all_pairs_of_answers():
    ours = Answers("ppo", "d", (generation("a"), generation("b")), gold=(2.0, 1.0))
    theirs = Answers("sft", "d", (generation("b"), generation("a"), generation("a")), gold=(1.0, 1.0, 3.0))
    wins = win_rate(ours, theirs, level=LEVEL)
    assert wins["mean"] == 0.5  # prompt a: one of two; prompt b: a tie
    assert (wins["against"], wins["prompts"]) == ("sft", 2)
    assert improvement(ours, theirs, level=LEVEL)["mean"] == 0.0  # prompt a: 2 - 2; prompt b: 1 - 1


def test_policies_that_share_no_prompt_cannot_be_compared():
    ours = Answers("ppo", "d", (generation("a"),), gold=(1.0,))
    theirs = Answers("sft", "d", (generation("b"),), gold=(1.0,))
    with pytest.raises(DataError, match="they have no prompts in common"):
        win_rate(ours, theirs, level=LEVEL)


def test_a_policy_without_answers_is_refused():
    with pytest.raises(DataError, match="contains no answers"):
        Answers("ppo", "d", ())


def test_a_reward_of_right_and_wrong_is_a_share_also_where_all_agree():
    """Both policies solve all of 8 prompts: neither is perfect for that, nor are they equal to the last digit."""
    right = Answers("ppo", "d", tuple(generation(prompt) for prompt in "abcdefgh"), gold=(1.0,) * 8)
    row, apart = summary(right, level=LEVEL), improvement(right, right, level=LEVEL)
    assert row["gold"]["low"] < 0.7 and row["gold"]["high"] == 1.0 and row["truncated"]["high"] > 0.3
    assert apart["low"] < -0.2 and apart["high"] > 0.2


def test_one_prompt_has_no_interval():
    ours = Answers("ppo", "d", (generation("a"), generation("a")), gold=(2.0, 3.5))
    theirs = Answers("sft", "d", (generation("a"),), gold=(1.0,))
    assert summary(ours, level=LEVEL)["gold"] == {"mean": 2.75, "prompts": 1}
    assert improvement(ours, theirs, level=LEVEL) == {"mean": 1.75, "prompts": 1, "against": "sft"}
    assert win_rate(ours, theirs, level=LEVEL)["low"] < 0.5
