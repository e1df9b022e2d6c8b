"""SAPO's gate against its closed form, worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.policy.weighted import SAPOLoss
from tests.support.losses import of_tokens

sapo_loss = of_tokens(SAPOLoss)


def one_token(ratio: float, advantage: float, **taus: float) -> tuple[float, float]:
    """The loss of a single token with that probability ratio, and its gradient by log pi."""
    logprobs_BL = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one_BL = torch.ones(1, 1, dtype=torch.float64)
    loss = sapo_loss(logprobs_BL, 0 * one_BL, advantage * one_BL, one_BL, **taus).loss
    loss.backward()
    assert logprobs_BL.grad is not None
    return loss.item(), logprobs_BL.grad.item()


def test_on_policy_the_gradient_is_the_policy_gradient_whatever_the_temperature() -> None:
    # f(1) = 4 / tau * 1/2 = 2 / tau; f'(1) = 4 * 1/4 = 1
    assert one_token(1.0, 3.0, tau_positive=2.0, tau_negative=5.0) == pytest.approx((-3.0 * 2 / 2, -3.0))
    assert one_token(1.0, -3.0, tau_positive=2.0, tau_negative=5.0) == pytest.approx((3.0 * 2 / 5, 3.0))


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.5, 1.0, 2.0), (0.4, 1.0, 2.0), (3.0, -2.0, 5.0)])
def test_the_gradient_fades_with_the_distance_of_the_ratio_from_one(ratio: float, advantage: float, tau: float) -> None:
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    loss, gradient = one_token(ratio, advantage, tau_positive=2.0, tau_negative=5.0)
    assert loss == pytest.approx(-4 / tau * gate * advantage)
    # f'(rho) rho A = 4 gate (1 - gate) rho A = sech^2(tau (rho - 1) / 2) rho A
    assert gradient == pytest.approx(-(ratio * advantage) / math.cosh(tau * (ratio - 1) / 2) ** 2)


def test_rows_weigh_the_same_by_default_and_nothing_counts_as_clipped() -> None:
    assert SAPOLoss().aggregation == "seq_mean_token_mean"
    logprobs_BL, mask_BL = torch.zeros(2, 3), torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages_BL = torch.tensor([[1.0, 1.0, 1.0], [-2.0, 0.0, 0.0]])
    output = sapo_loss(logprobs_BL, logprobs_BL - 9.0, advantages_BL, mask_BL, tau_positive=1.0, tau_negative=1.05)
    assert output.metrics["clip_fraction"].item() == 0.0
    # so far off policy the gate is open, 4 / tau, and its gradient is gone: -(4 - 2 * 4 / 1.05) / 2
    assert output.loss.item() == pytest.approx(-(4 - 8 / 1.05) / 2)
