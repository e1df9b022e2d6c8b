"""The Bradley-Terry loss."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.losses.reward import bradley_terry_loss


def test_two_pairs_match_hand_computed_numbers() -> None:
    # -log sigmoid(2 - 0.5) = log(1 + e^-1.5); -log sigmoid(-1) = log(1 + e)
    output = bradley_terry_loss(
        torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]), centering_coef=0.0, pairs=2.0
    )
    expected = (math.log1p(math.exp(-1.5)) + math.log1p(math.e)) / 2
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.metrics["loss"].item() == pytest.approx(expected, rel=1e-6)
    assert output.metrics["accuracy"].item() == 0.5
    assert output.metrics["margin"].item() == 0.5  # (2 - 1) / 2, before the margin column


def test_centering_adds_the_squared_sum_of_the_scores() -> None:
    arguments = (torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]))
    plain = bradley_terry_loss(*arguments, centering_coef=0.0, pairs=1.0).loss.item()
    centred = bradley_terry_loss(*arguments, centering_coef=0.01, pairs=1.0).loss.item()
    assert centred - plain == pytest.approx(0.01 * 16, rel=1e-5)


def test_a_score_that_never_differs_has_no_accuracy() -> None:
    zeros_B = torch.zeros(4)
    output = bradley_terry_loss(zeros_B, zeros_B, zeros_B, centering_coef=0.0, pairs=4.0)
    assert output.metrics["accuracy"].item() == 0.0
    assert output.loss.item() == pytest.approx(math.log(2), rel=1e-6)
