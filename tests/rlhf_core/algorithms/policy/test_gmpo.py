"""GMPO against the product of clipped ratios, as the paper writes it, and cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.policy.gmpo import gmpo_loss
from rlhf_core.algorithms.policy.gspo import gspo_loss


def row(log_ratios: list[float], advantage: float) -> tuple[float, list[float], dict[str, float]]:
    """The loss of one sequence with those log-ratios, its gradient by log pi, and its metrics."""
    logprobs_BL = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    zeros_BL = torch.zeros_like(logprobs_BL)
    output = gmpo_loss(logprobs_BL, zeros_BL, zeros_BL + advantage, zeros_BL + 1, clip_low=0.3, clip_high=0.4)
    output.loss.backward()
    assert logprobs_BL.grad is not None
    return output.loss.item(), logprobs_BL.grad[0].tolist(), {k: v.item() for k, v in output.metrics.items()}


def test_a_positive_advantage_clips_only_tokens_that_became_likelier() -> None:
    loss, gradient, metrics = row([0.8, -1.0, 0.2], 2.0)
    ratio = math.exp((0.4 - 1.0 + 0.2) / 3)
    assert loss == pytest.approx(-2 * ratio)
    assert gradient == pytest.approx([0.0, -2 * ratio / 3, -2 * ratio / 3])
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)


def test_a_negative_advantage_clips_only_tokens_that_became_rarer() -> None:
    loss, gradient, _ = row([0.8, -1.0, 0.2], -2.0)
    ratio = math.exp((0.8 - 0.3 + 0.2) / 3)
    assert loss == pytest.approx(2 * ratio)
    assert gradient == pytest.approx([2 * ratio / 3, 0.0, 2 * ratio / 3])


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_it_is_the_papers_product_of_minima(advantage: float) -> None:
    """arXiv 2507.20673: (product of |min(rho A, clip(rho) A)|)^(1/n), with the sign of A."""
    log_ratios = [0.9, -0.7, 0.1, -0.2]
    low, high = math.exp(-0.3), math.exp(0.4)
    sign = 1 if advantage > 0 else -1
    terms = [min(math.exp(x) * sign, min(max(math.exp(x), low), high) * sign) for x in log_ratios]
    product = math.prod(abs(term) for term in terms) ** (1 / len(terms))
    assert row(log_ratios, advantage)[0] == pytest.approx(-product * advantage)


def test_inside_the_bounds_it_is_gspo_without_a_clip() -> None:
    generator = torch.Generator().manual_seed(1)
    log_ratios_BL = 0.1 * torch.rand(3, 4, generator=generator, dtype=torch.float64)
    zeros_BL, advantages_BL = torch.zeros_like(log_ratios_BL), torch.ones_like(log_ratios_BL)
    batch = (log_ratios_BL, zeros_BL, advantages_BL, advantages_BL)
    ours = gmpo_loss(*batch, clip_low=0.4, clip_high=0.4).loss
    assert ours.item() == pytest.approx(gspo_loss(*batch, clip_low=0.9, clip_high=0.9).loss.item())
