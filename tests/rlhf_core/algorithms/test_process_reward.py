"""Step losses and the reduction of step scores."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.token_math import reduce_steps, step_loss
from rlhf_core.errors import DataError


def test_hard_and_soft_labels_are_scored_by_their_cross_entropy() -> None:
    # logit log 3 is probability 3/4: -log 3/4 for label 1; for 1/4: -(log 3/4) / 4 - 3/4 log 1/4
    logits_S, labels_S = torch.full((2,), math.log(3)), torch.tensor([1.0, 0.25])
    output = step_loss(logits_S, labels_S)
    expected = (-math.log(0.75) - 0.25 * math.log(0.75) - 0.75 * math.log(0.25)) / 2
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.metrics["accuracy"].item() == 0.5
    assert output.metrics["positive_fraction"].item() == 0.5


def test_the_gradient_is_the_error_of_the_probability() -> None:
    logits_S = torch.tensor([0.0, math.log(3)], requires_grad=True)
    step_loss(logits_S, torch.tensor([1.0, 0.25]), steps=4.0).loss.backward()
    assert logits_S.grad is not None
    assert logits_S.grad.tolist() == pytest.approx([(0.5 - 1) / 4, (0.75 - 0.25) / 4], rel=1e-6)


def test_the_loss_matches_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(14)
    logits_S, labels_S = 3 * torch.randn(30, generator=generator), torch.rand(30, generator=generator)
    terms = []
    for x, y in zip(logits_S.tolist(), labels_S.tolist(), strict=True):
        p = 1 / (1 + math.exp(-x))
        terms.append(-y * math.log(p) - (1 - y) * math.log(1 - p))
    assert step_loss(logits_S, labels_S).loss.item() == pytest.approx(sum(terms) / 30, rel=1e-6)


def test_a_huge_logit_on_the_wrong_side_costs_itself_and_not_infinity() -> None:
    assert step_loss(torch.tensor([-200.0]), torch.tensor([1])).loss.item() == 200.0


def test_a_model_that_never_decides_is_never_right() -> None:
    assert step_loss(torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 1.0])).metrics["accuracy"].item() == 0.0


@pytest.mark.parametrize("label", [-0.1, 1.5, float("nan")])
def test_a_label_that_is_no_probability_is_refused(label: float) -> None:
    with pytest.raises(DataError, match=r"labels = .* scale them to \[0, 1\]"):
        step_loss(torch.zeros(1), torch.tensor([label]))


@pytest.mark.parametrize(("how", "expected"), [("min", 0.2), ("mean", 0.5), ("last", 0.4), ("product", 0.072)])
def test_the_steps_of_an_answer_reduce_to_one_score(how: str, expected: float) -> None:
    # 0.2; (0.9 + 0.2 + 0.4) / 3; 0.4; 0.9 * 0.2 * 0.4
    score = reduce_steps(torch.tensor([0.9, 0.2, 0.4]), how=how)  # type: ignore[arg-type]
    assert score.dim() == 0 and score.item() == pytest.approx(expected, rel=1e-6)


def test_several_answers_reduce_at_once() -> None:
    assert reduce_steps(torch.tensor([[0.5, 0.25], [1.0, 0.5]]), how="product").tolist() == [0.125, 0.5]


def test_an_answer_without_steps_is_refused() -> None:
    with pytest.raises(DataError, match="steps = 0"):
        reduce_steps(torch.zeros(0), how="min")
