"""Equality, patterns, length and repetition."""

import pytest

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.library.text import exact_match, length_target, overlong_penalty, regex_match, repetition_penalty


def test_exact_match_ignores_white_space_case_and_a_period():
    answers = [" Paris.\n", "paris", "Paris, France", "Paris"]
    assert exact_match([""] * 4, answers, ["Paris", "Paris", "Paris", None]) == [1.0, 1.0, 0.0, None]
    assert exact_match([""], ["paris"], ["Paris"], ignore_case=False) == [0.0]


def test_a_label_of_periods_alone_is_none_and_an_empty_answer_does_not_match_it():
    assert exact_match([""] * 2, ["", "..."], [" ."] * 2) == [None, None]


def test_regex_match_searches_or_matches_the_whole():
    assert regex_match([""] * 2, ["a\n12", "b"], [None] * 2, pattern=r"\d+") == [1.0, 0.0]
    assert regex_match([""] * 2, ["x12", "12"], [None] * 2, pattern=r"\d+", whole=True) == [0.0, 1.0]


def test_regex_match_takes_the_label_literally():
    values = regex_match([""] * 3, ["#### 1.5", "#### 125", "x"], ["1.5", "1.5", ""], pattern=r"#### {label}$")
    assert values == [1.0, 0.0, None]


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"pattern = '\('"):
        regex_match([""], ["x"], [None], pattern="(")


def test_length_target_falls_linearly():
    values = length_target([""] * 3, ["a b c d", "a b", ""], [None] * 3, target=4, width=4, unit="words")
    assert values == [1.0, 0.5, 0.0]


def test_tokens_are_counted_by_their_ids_and_never_guessed():
    ids = [[1] * 95, [1] * 10]
    values = overlong_penalty([""] * 2, ["x", "y"], [None] * 2, limit=100, buffer=20, completion_ids=ids)
    assert values == [-0.75, 0.0]  # 95 is 15 of 20 into the buffer
    with pytest.raises(RewardError, match="completion_ids"):
        overlong_penalty([""], ["x"], [None], limit=100, buffer=20)


def test_an_environments_tokens_are_not_counted():
    ids, mask = [[1] * 99], [[1] * 40 + [0] * 9 + [1] * 50]
    values = overlong_penalty([""], ["x"], [None], limit=100, buffer=20, completion_ids=ids, action_mask=mask)
    assert values == [-0.5]  # 90 sampled


def test_repetition_is_the_share_of_ngrams_seen_before():
    # a b, b a, a b, b a: 2 of 4 are new; c d e has no repeated one; one word has none at all
    assert repetition_penalty([""] * 3, ["a b A b a", "c d e", "c"], [None] * 3, ngram=2) == [-0.5, 0.0, 0.0]
    assert repetition_penalty([""], ["a b a b a"], [None], ngram=2, factor=2.0) == [-1.0]
