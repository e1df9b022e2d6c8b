"""SimPO and ORPO against numbers worked by hand and slow loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_core.algorithms.preference.reference_free import ORPOLoss, SimPOLoss
from tests.support.losses import of_pairs

simpo_loss, orpo_loss = of_pairs(SimPOLoss), of_pairs(ORPOLoss)


LENGTHS: dict[str, Any] = {"chosen_lengths": torch.tensor([4]), "rejected_lengths": torch.tensor([6])}


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def test_simpo_compares_length_normalised_logprobs_with_a_target_margin() -> None:
    # 2 * (-10/4 + 21/6) - 0.5 = 1.5
    output = simpo_loss(torch.tensor([-10.0]), torch.tensor([-21.0]), **LENGTHS, beta=2.0, gamma=0.5)
    assert output.loss.item() == pytest.approx(softplus(-1.5), rel=1e-6)
    assert output.metrics["rewards/chosen"].item() == -5.0


def test_orpo_adds_the_odds_ratio_to_the_token_mean_of_the_chosen_answers() -> None:
    # mean log-probs -1 and -2: odds e^-1 / (1 - e^-1) = 0.5820 and e^-2 / (1 - e^-2) = 0.1565
    output = orpo_loss(torch.tensor([-4.0]), torch.tensor([-12.0]), **LENGTHS, odds_weight=0.1)
    log_odds_ratio = math.log(math.exp(-1) / (1 - math.exp(-1))) - math.log(math.exp(-2) / (1 - math.exp(-2)))
    assert output.loss.item() == pytest.approx(1.0 + 0.1 * softplus(-log_odds_ratio), rel=1e-6)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics["nll"] == 1.0
    assert metrics["log_odds_ratio"] == pytest.approx(log_odds_ratio, rel=1e-6)
    assert metrics["odds_ratio_loss"] == pytest.approx(softplus(-log_odds_ratio), rel=1e-6)
    assert metrics["loss"] == output.loss.item()
    assert metrics["rewards/margin"] == pytest.approx(0.1, rel=1e-6)


def test_the_terms_of_orpo_have_denominators_of_their_own() -> None:
    # 4 of 16 chosen tokens and 1 of 2 pairs of the step
    logprobs = (torch.tensor([-4.0]), torch.tensor([-12.0]))
    metrics = orpo_loss(*logprobs, **LENGTHS, odds_weight=0.1, pairs=2.0, tokens=16.0).metrics
    whole = orpo_loss(*logprobs, **LENGTHS, odds_weight=0.1).metrics
    assert metrics["nll"].item() == 0.25
    assert metrics["odds_ratio_loss"].item() == pytest.approx(whole["odds_ratio_loss"].item() / 2, rel=1e-6)


def test_orpo_stays_finite_where_an_answer_is_certain() -> None:
    chosen = torch.tensor([0.0], requires_grad=True)
    output = orpo_loss(chosen, torch.tensor([-600.0]), **LENGTHS, odds_weight=0.1)
    output.loss.backward()
    assert math.isfinite(output.loss.item())
    assert chosen.grad is not None and chosen.grad.item() == -0.25  # the likelihood's alone


def test_both_losses_match_slow_loops() -> None:
    generator = torch.Generator().manual_seed(12)
    lengths = [torch.randint(3, 30, (20,), generator=generator) for _ in range(2)]
    logprobs = [-(0.3 + torch.rand(20, generator=generator)) * length for length in lengths]
    rows = list(zip(*(x.tolist() for x in (*logprobs, *lengths)), strict=True))
    named: dict[str, Any] = dict(zip(("chosen_lengths", "rejected_lengths"), lengths, strict=True))

    expected = sum(softplus(-(2.5 * (c / m - r / n) - 0.8)) for c, r, m, n in rows) / 20
    assert simpo_loss(*logprobs, **named, beta=2.5, gamma=0.8).loss.item() == pytest.approx(expected, rel=1e-6)

    def log_odds(x: float) -> float:
        return x - math.log1p(-math.exp(x))

    nll = -sum(c for c, *_ in rows) / sum(m for _, _, m, _ in rows)
    ratio = sum(softplus(-(log_odds(c / m) - log_odds(r / n))) for c, r, m, n in rows) / 20
    assert orpo_loss(*logprobs, **named, odds_weight=0.4).loss.item() == pytest.approx(nll + 0.4 * ratio, rel=1e-6)
