"""The Bradley-Terry loss and the scores of an ensemble."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.token_math import bradley_terry_loss, ensemble_score


def test_two_pairs_match_hand_computed_numbers() -> None:
    # -log sigmoid(2 - 0.5) = log(1 + e^-1.5); -log sigmoid(-1) = log(1 + e)
    output = bradley_terry_loss(
        torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]), margin=torch.tensor([0.5, 0.0]), center_coef=0.0
    )
    expected = (math.log1p(math.exp(-1.5)) + math.log1p(math.e)) / 2
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.metrics["loss"].item() == pytest.approx(expected, rel=1e-6)
    assert output.metrics["accuracy"].item() == 0.5
    assert output.metrics["margin"].item() == 0.5  # (2 - 1) / 2, before the margin column


def test_centering_adds_the_squared_sum_of_the_scores() -> None:
    arguments = (torch.tensor([3.0]), torch.tensor([1.0]))
    plain = bradley_terry_loss(*arguments, pairs=1.0).loss.item()
    centred = bradley_terry_loss(*arguments, center_coef=0.01, pairs=1.0).loss.item()
    assert centred - plain == pytest.approx(0.01 * 16, rel=1e-5)


def test_a_score_that_never_differs_has_no_accuracy() -> None:
    zeros_B = torch.zeros(4)
    output = bradley_terry_loss(zeros_B, zeros_B)
    assert output.metrics["accuracy"].item() == 0.0
    assert output.loss.item() == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("margin", [0.0, 0.7, torch.tensor([0.0, 1.0, 2.0, 0.5, 0.1])])
def test_the_loss_matches_a_slow_loop(margin: torch.Tensor | float) -> None:
    generator = torch.Generator().manual_seed(6)
    chosen, rejected = (2 * torch.randn(5, generator=generator) for _ in range(2))
    margins = margin.tolist() if isinstance(margin, torch.Tensor) else [margin] * 5
    terms = [
        math.log1p(math.exp(-(c - r - m))) + 0.02 * (c + r) ** 2
        for c, r, m in zip(chosen.tolist(), rejected.tolist(), margins, strict=True)
    ]
    loss = bradley_terry_loss(chosen, rejected, margin=margin, center_coef=0.02).loss.item()
    assert loss == pytest.approx(sum(terms) / 5, rel=1e-6)


def test_half_precision_scores_are_compared_in_fp32() -> None:
    output = bradley_terry_loss(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16))
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(math.log1p(math.exp(-0.5)), rel=1e-6)


def test_an_ensemble_reduces_to_its_mean_its_worst_or_its_mean_less_the_spread() -> None:
    # second row: mean 3, deviations -2, 0, 2, population variance 8/3
    scores_MB = torch.tensor([[1.0, 1.0], [1.0, 3.0], [1.0, 5.0]])
    assert ensemble_score(scores_MB, reduce="mean").tolist() == [1.0, 3.0]
    assert ensemble_score(scores_MB, reduce="min").tolist() == [1.0, 1.0]
    expected = [1.0, 3 - 0.5 * math.sqrt(8 / 3)]
    assert ensemble_score(scores_MB, reduce="mean_minus_std", k=0.5).tolist() == pytest.approx(expected, rel=1e-6)


def test_an_ensemble_of_one_is_its_only_model() -> None:
    assert ensemble_score(torch.tensor([[2.0, -1.0]]), reduce="mean_minus_std").tolist() == [2.0, -1.0]
