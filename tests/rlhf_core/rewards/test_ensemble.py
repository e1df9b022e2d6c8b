"""Several reward models, one score."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlhf_core.algorithms.token_math import EnsembleReduction
from rlhf_core.rewards.terms import score_with_ensemble
from rlhf_core.types import Completion, Generation, Message, Prompt

PROMPT = Prompt("p", (Message("user", "hi"),), "", "test")
ANSWERS = [Generation(PROMPT, (1,), Completion((3,) * size, (-1.0,) * size, "", "stop", 0, 0)) for size in (1, 2)]


def first(generations: Sequence[Generation]) -> list[float]:
    return [1.0 * len(one.completion.token_ids) for one in generations]


def second(generations: Sequence[Generation]) -> list[float]:
    return [3.0 for _ in generations]


@pytest.mark.parametrize(
    ("reduce", "k", "scores"),
    [
        ("mean", 1.0, [2.0, 2.5]),
        ("min", 1.0, [1.0, 2.0]),
        ("mean_minus_std", 1.0, [1.0, 2.0]),  # (1, 3): mean 2, std 1; (2, 3): mean 2.5, std 0.5
        ("mean_minus_std", 2.0, [0.0, 1.5]),
    ],
)
def test_each_answer_is_reduced_over_the_members(reduce: EnsembleReduction, k: float, scores: list[float]) -> None:
    outcome = score_with_ensemble([first, second], ANSWERS, reduce=reduce, k=k)
    assert outcome.values == pytest.approx(scores)


def test_disagreement_and_the_lower_bound_are_logged_however_the_scores_are_reduced() -> None:
    logs = score_with_ensemble([first, second], ANSWERS, reduce="mean", k=1.0).logs
    assert logs["disagreement"] == (pytest.approx(1.0 + 0.5), 2)  # (1, 3) and (2, 3)
    assert logs["lower_bound"] == (pytest.approx(1.0 + 2.0), 2)
