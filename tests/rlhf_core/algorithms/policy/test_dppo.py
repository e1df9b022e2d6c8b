"""DPPO: which tokens its divergences drop, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.policy.weighted import Divergence, DPPOLoss, binary_divergence
from tests.support.losses import of_tokens

dppo_loss = of_tokens(DPPOLoss)


def one_token(
    new: float, old: float, advantage: float, *, divergence: Divergence = "tv", threshold: float = 0.15
) -> tuple[float, float, float]:
    """The loss of a token with those probabilities, its gradient by log pi, and the fraction that was dropped."""
    logprobs_BL = torch.tensor([[math.log(new)]], dtype=torch.float64, requires_grad=True)
    old_BL, one_BL = torch.tensor([[math.log(old)]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    output = dppo_loss(
        logprobs_BL,
        old_BL,
        advantage * one_BL,
        one_BL,
        divergence=divergence,
        threshold_low=threshold,
        threshold_high=threshold,
        ratio_cap=20.0,
    )
    output.loss.backward()
    assert logprobs_BL.grad is not None
    return output.loss.item(), logprobs_BL.grad.item(), output.metrics["clip_fraction"].item()


@pytest.mark.parametrize(
    ("new", "old", "advantage", "ratio"),
    [
        (0.55, 0.5, 1.0, 1.1),
        (0.01, 0.001, 1.0, 10.0),  # PPO would clip a ratio of 10; the probability has moved by 0.009
        (0.8, 0.5, -1.0, 1.6),  # far off, but the update leads back
        (0.2, 0.5, 1.0, 0.4),
        (0.5, 0.5, 3.0, 1.0),
    ],
)
def test_a_token_that_stays_near_or_returns_has_the_plain_policy_gradient(
    new: float, old: float, advantage: float, ratio: float
) -> None:
    assert one_token(new, old, advantage) == pytest.approx((-ratio * advantage, -ratio * advantage, 0.0))


@pytest.mark.parametrize(("new", "old", "advantage"), [(0.7, 0.5, 1.0), (0.3, 0.5, -1.0), (0.99, 0.83, 1.0)])
def test_a_token_that_goes_on_beyond_the_threshold_is_dropped(new: float, old: float, advantage: float) -> None:
    assert one_token(new, old, advantage) == (0.0, 0.0, 1.0)  # PPO keeps 0.99 / 0.83 = 1.19


def test_the_cap_bounds_the_weight_and_keeps_the_gradient() -> None:
    # ratio 100, divergence 0.0099
    assert one_token(0.01, 0.0001, 2.0) == pytest.approx((-40.0, -40.0, 0.0))


def test_the_divergences_are_those_of_two_coins() -> None:
    new_BL, old_BL = torch.tensor([[0.7]], dtype=torch.float64).log(), torch.tensor([[0.4]], dtype=torch.float64).log()
    assert binary_divergence(new_BL, old_BL, divergence="tv").item() == pytest.approx(0.3)
    kl = 0.4 * math.log(0.4 / 0.7) + 0.6 * math.log(0.6 / 0.3)
    assert binary_divergence(new_BL, old_BL, divergence="kl").item() == pytest.approx(kl)
    coins = [torch.distributions.Bernoulli(probs=x.exp()) for x in (old_BL, new_BL)]
    assert torch.distributions.kl_divergence(*coins).item() == pytest.approx(kl)
    assert one_token(0.7, 0.4, 1.0, divergence="kl", threshold=kl + 1e-9)[2] == 0.0
    assert one_token(0.7, 0.4, 1.0, divergence="kl", threshold=kl - 1e-9)[2] == 1.0


def test_a_certain_token_has_a_finite_divergence() -> None:
    certain_BL, likely_BL = torch.zeros(1, 1), torch.full((1, 1), math.log(0.5))
    assert binary_divergence(certain_BL, certain_BL, divergence="kl").item() == 0.0
    assert 20 < binary_divergence(certain_BL, likely_BL, divergence="kl").item() < 100
