"""What the answers of a step say about the policy's health."""

import pytest

from rlhf_core.rollouts.scored_step import answer_metrics, zero_variance
from rlhf_core.types import Completion, FinishReason

END = 2


def said(text: str, *tokens: int, finish: FinishReason = "stop") -> Completion:
    return Completion(tokens, (-0.5,) * len(tokens), text, finish, 0, 0)


def test_answers_of_one_word_are_alike_and_have_no_pairs():
    metrics = answer_metrics([said("ok", 5)] * 4, ends=(5,))
    assert metrics == {
        "rollout/unique": 0.25,
        "rollout/distinct_2": 0.0,
        "rollout/repetition": 0.0,
        "rollout/ended": 1.0,
    }


def test_pairs_are_counted_over_all_answers_and_repetitions_within_each():
    answers = [said("a", 5, 6, 7, END), said("b", 5, 6, 7, 5, 6, 7, END)]
    metrics = answer_metrics(answers, ends=(END,))
    # pairs: 56 67 72, and 56 67 75 56 67 72: 4 different ones of 9
    assert metrics["rollout/distinct_2"] == pytest.approx(4 / 9)
    # triples of the second answer: 567 675 756 567 672, one of 5 had been there; the first repeats nothing
    assert metrics["rollout/repetition"] == pytest.approx((0 + 1 / 5) / 2)
    assert metrics["rollout/unique"] == 1.0


def test_only_answers_that_ended_by_themselves_must_have_an_end_token():
    cut = said("c", 5, 6, finish="length")
    assert answer_metrics([said("a", 5, END), cut], ends=(END, 9))["rollout/ended"] == 1.0
    assert answer_metrics([said("a", 5, END), said("b", 5, 6), cut], ends=(END,))["rollout/ended"] == 0.5
    assert answer_metrics([cut], ends=(END,))["rollout/ended"] == 1.0
    assert answer_metrics([said("a", 5, END), said("b", 5, 6)], ends=(END,), stop=("b",))["rollout/ended"] == 1.0


def test_groups_whose_answers_earn_the_same_are_a_share_of_all():
    assert zero_variance([1.0, 1.0, 0.0, 1.0], group_size=2) == {"rollout/zero_variance": 0.5}
    assert zero_variance([1.0, 1.0], group_size=1) == {}
