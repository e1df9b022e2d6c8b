"""The clipped policy loss, GSPO, GMPO and CISPO, against slow float64 loops and cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.policy.base import aggregate
from rlhf_core.algorithms.policy.clip import ClipLoss, GMPOLoss, GSPOLoss
from rlhf_core.algorithms.policy.weighted import CISPOLoss
from rlhf_core.algorithms.token_math import LossOutput
from tests.support.losses import of_tokens

clipped_policy_loss, gspo_loss = of_tokens(ClipLoss), of_tokens(GSPOLoss)
gmpo_loss, cispo_loss = of_tokens(GMPOLoss), of_tokens(CISPOLoss)

DEFAULTS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 0.0,
    "aggregation": "token_mean",
    "sequences": 1.0,
    "max_length": 8.0,
}


def one_token(ratio: float, advantage: float, *, dual_clip: float = 0.0) -> tuple[LossOutput, float]:
    """The loss of a single token with that probability ratio, and its gradient by log pi."""
    logprobs_BL = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one_BL = torch.ones(1, 1, dtype=torch.float64)
    output = clipped_policy_loss(
        logprobs_BL,
        0 * one_BL,
        advantage * one_BL,
        one_BL,
        **DEFAULTS | {"dual_clip": dual_clip},
    )
    output.loss.backward()
    assert logprobs_BL.grad is not None
    return output, logprobs_BL.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.2, 1.0, -1.2, -1.2, 0.0),  # inside the higher bound of 1.28
        (1.5, 1.0, -1.28, 0.0, 1.0),  # gained enough
        (0.5, 1.0, -0.5, -0.5, 0.0),  # a good token that became unlikely is always pulled back
        (0.5, -1.0, 0.8, 0.0, 1.0),  # lost enough
        (1.5, -1.0, 1.5, 1.5, 0.0),  # a bad token that became likely is always pushed down
    ],
)
def test_each_side_of_the_clip(ratio: float, advantage: float, loss: float, gradient: float, clipped: float) -> None:
    output, grad = one_token(ratio, advantage)
    assert output.loss.item() == pytest.approx(loss)
    assert grad == pytest.approx(gradient)
    assert output.metrics["clip_fraction"].item() == clipped
    assert output.metrics["ratio_max"].item() == pytest.approx(ratio)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    output, grad = one_token(10.0, -1.0, dual_clip=3.0)
    assert (output.loss.item(), grad, output.metrics["clip_fraction"].item()) == (3.0, 0.0, 1.0)
    output, grad = one_token(2.0, -1.0, dual_clip=3.0)
    assert [output.loss.item(), grad] == pytest.approx([2.0, 2.0])
    output, _ = one_token(1.1, 1.0, dual_clip=3.0)
    assert output.loss.item() == pytest.approx(-1.1)


def slow_loss(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor, weights: Tensor, aggregation: str) -> float:
    """The formula token by token in Python floats; the batch is the whole step."""
    rows = []
    for b in range(new.shape[0]):
        terms = []
        for t in range(new.shape[1]):
            if mask[b, t]:
                rho, a = math.exp(new[b, t].item() - old[b, t].item()), adv[b, t].item()
                value = min(rho * a, min(max(rho, 0.8), 1.28) * a)
                if a < 0:
                    value = max(value, 3.0 * a)
                terms.append(-weights[b, t].item() * value)
        rows.append(terms)
    if aggregation == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "seq_mean_token_mean":
        return sum(sum(terms) / len(terms) for terms in rows if terms) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * 8.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "constant"])
def test_the_loss_matches_a_slow_loop(aggregation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    new, old, adv = (torch.randn(5, 7, generator=generator) for _ in range(3))
    weights = torch.rand(5, 7, generator=generator) * 2
    mask = torch.rand(5, 7, generator=generator) > 0.5
    mask[2] = False  # a row without a trained token
    arguments = DEFAULTS | {"dual_clip": 3.0, "aggregation": aggregation, "sequences": 5.0}
    output = clipped_policy_loss(new, old, adv, mask, weights=weights, **arguments)
    assert output.loss.item() == pytest.approx(slow_loss(new, old, adv, mask, weights, aggregation), rel=1e-6)


def test_before_the_first_update_the_ratio_is_exactly_one() -> None:
    logprobs_BL = torch.tensor([[-0.1, -7.3, -2.2]])
    ones_BL = torch.ones(1, 3)
    output = clipped_policy_loss(logprobs_BL, logprobs_BL.clone(), ones_BL, ones_BL, **DEFAULTS)
    assert output.metrics["ratio_max"].item() == 1.0
    assert output.metrics["approx_kl"].item() == 0.0
    assert output.metrics["clip_fraction"].item() == 0.0


def test_approx_kl_is_k3_of_old_against_new() -> None:
    # tokens come from the old policy: d = log old - log new = -0.4; k3 = e^0.4 - 1 - 0.4
    ones_BL = torch.ones(1, 1)
    output = clipped_policy_loss(torch.tensor([[-1.0]]), torch.tensor([[-1.4]]), ones_BL, ones_BL, **DEFAULTS)
    assert output.metrics["approx_kl"].item() == pytest.approx(math.exp(0.4) - 1.4, rel=1e-5)


def test_importance_weights_scale_the_loss_without_a_gradient_of_their_own() -> None:
    logprobs_BL = torch.zeros(1, 2, requires_grad=True)
    weights_BL = torch.tensor([[0.5, 0.0]], requires_grad=True)
    ones_BL = torch.ones(1, 2)
    output = clipped_policy_loss(logprobs_BL, torch.zeros(1, 2), ones_BL, ones_BL, weights=weights_BL, **DEFAULTS)
    output.loss.backward()
    assert output.loss.item() == -0.25  # the dropped token stays in the denominator
    assert weights_BL.grad is None
    assert logprobs_BL.grad is not None and logprobs_BL.grad.tolist() == [[-0.25, 0.0]]


def test_the_three_aggregations_weigh_long_and_short_rows_as_named() -> None:
    x_BL, mask_BL = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    scalars = {"tokens": 4.0, "sequences": 2.0, "max_length": 8.0}
    assert aggregate(x_BL, mask_BL, aggregation="token_mean", **scalars).item() == 2.0  # 8 / 4
    assert aggregate(x_BL, mask_BL, aggregation="seq_mean_token_mean", **scalars).item() == 3.0  # (1 + 5) / 2
    assert aggregate(x_BL, mask_BL, aggregation="constant", **scalars).item() == 0.5  # 8 / (2 * 8)


def gspo_row(log_ratios: list[float], advantage: float, **scalars: float) -> tuple[LossOutput, list[float]]:
    """The loss of one sequence with those log-ratios, and its gradient by log pi."""
    logprobs_BL = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    zeros_BL = torch.zeros_like(logprobs_BL)
    output = gspo_loss(logprobs_BL, zeros_BL, zeros_BL + advantage, zeros_BL + 1, **scalars)
    output.loss.backward()
    assert logprobs_BL.grad is not None
    return output, logprobs_BL.grad[0].tolist()


def test_gspo_has_one_ratio_for_a_sequence_the_geometric_mean_of_its_tokens() -> None:
    # mean log-ratio (0.3 - 0.1 + 0.1) / 3 = 0.1; every token gets a third of the row's gradient, -A s / 3
    output, gradient = gspo_row([0.3, -0.1, 0.1], 2.0, clip_low=0.2, clip_high=0.2)
    assert output.loss.item() == pytest.approx(-2 * math.exp(0.1), rel=1e-12)
    assert gradient == pytest.approx([-2 * math.exp(0.1) / 3] * 3, rel=1e-12)
    assert output.metrics["ratio_max"].item() == pytest.approx(math.exp(0.1), rel=1e-12)


def test_gspo_clips_a_sequence_as_a_whole_at_the_bounds_of_the_paper() -> None:
    # mean log-ratio 0.01: s = 1.01005 > 1.0004
    output, gradient = gspo_row([0.03, -0.01], 1.0)
    assert output.loss.item() == pytest.approx(-1.0004, rel=1e-12)
    assert gradient == [0.0, 0.0]
    assert output.metrics["clip_fraction"].item() == 1.0
    output, _ = gspo_row([-0.03, 0.01], -1.0)  # s = 0.99005 < 0.9997: the pessimistic bound is the larger loss
    assert output.loss.item() == pytest.approx(0.9997, rel=1e-12)


def slow_gspo(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> float:
    """The formula sequence by sequence, in Python floats."""
    total = 0.0
    for b in range(new.shape[0]):
        at = [t for t in range(new.shape[1]) if mask[b, t]]
        if at:
            ratio = math.exp(sum(new[b, t].item() - old[b, t].item() for t in at) / len(at))
            bound = min(max(ratio, 0.9), 1.1)
            total -= sum(min(ratio * a, bound * a) for a in (adv[b, t].item() for t in at)) / len(at)
    return total / new.shape[0]


def slow_cispo(new: Tensor, old: Tensor, adv: Tensor, mask: Tensor, high: float) -> float:
    terms = []
    for b, t in mask.nonzero().tolist():
        ratio = math.exp(new[b, t].item() - old[b, t].item())
        terms.append(-min(ratio, high) * adv[b, t].item() * new[b, t].item())
    return sum(terms) / len(terms)


def random_batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    new, old, adv = (0.4 * torch.randn(5, 7, generator=generator) - 1 for _ in range(3))
    mask = torch.rand(5, 7, generator=generator) > 0.4
    mask[1] = False
    return new, old, adv + 1, mask


def test_gspo_matches_a_slow_loop() -> None:
    batch = random_batch()
    assert gspo_loss(*batch, clip_low=0.1, clip_high=0.1).loss.item() == pytest.approx(slow_gspo(*batch), rel=1e-6)


def test_cispo_matches_a_slow_loop() -> None:
    batch = random_batch()
    output = cispo_loss(*batch, clip_high=0.28)
    assert output.loss.item() == pytest.approx(slow_cispo(*batch, 1.28), rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "weight", "clipped"),
    [
        (1.1, 1.1, 0.0),
        (3.0, 1.28, 1.0),  # bounded, and still trained: PPO would drop the token
        (0.1, 0.1, 0.0),  # open below
    ],
)
def test_cispo_bounds_the_weight_of_a_token_and_keeps_its_gradient(ratio: float, weight: float, clipped: float) -> None:
    # loss -w A log pi at log pi = -2, A = 1.5; gradient -w A: the ratio carries none
    logprobs_BL = torch.tensor([[-2.0]], dtype=torch.float64, requires_grad=True)
    old_BL = torch.tensor([[-2.0 - math.log(ratio)]], dtype=torch.float64)
    one_BL = torch.ones_like(old_BL)
    output = cispo_loss(logprobs_BL, old_BL, 1.5 * one_BL, one_BL, clip_high=0.28)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(weight * 1.5 * 2, rel=1e-12)
    assert logprobs_BL.grad is not None and logprobs_BL.grad.item() == pytest.approx(-weight * 1.5, rel=1e-12)
    assert output.metrics["clip_fraction"].item() == clipped


@pytest.mark.parametrize("loss", [clipped_policy_loss, gspo_loss, cispo_loss])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss: Any) -> None:
    # ratio 1: the token mean of -A grad log pi, with advantages equal along a row
    logprobs_BL = torch.tensor([[-0.5, -1.0], [-2.0, -0.1]], requires_grad=True)
    advantages_BL = torch.tensor([[1.0, 1.0], [-3.0, -3.0]])
    output = loss(logprobs_BL, logprobs_BL.detach(), advantages_BL, torch.ones(2, 2))
    output.loss.backward()
    assert logprobs_BL.grad is not None
    assert logprobs_BL.grad.tolist() == [[-0.25, -0.25], [0.75, 0.75]]
    assert output.metrics["ratio_max"].item() == 1.0


def gmpo_row(log_ratios: list[float], advantage: float) -> tuple[float, list[float], dict[str, float]]:
    """The loss of one sequence with those log-ratios, its gradient by log pi, and its metrics."""
    logprobs_BL = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    zeros_BL = torch.zeros_like(logprobs_BL)
    output = gmpo_loss(logprobs_BL, zeros_BL, zeros_BL + advantage, zeros_BL + 1, clip_low=0.3, clip_high=0.4)
    output.loss.backward()
    assert logprobs_BL.grad is not None
    return output.loss.item(), logprobs_BL.grad[0].tolist(), {k: v.item() for k, v in output.metrics.items()}


def test_in_gmpo_a_positive_advantage_clips_only_tokens_that_became_likelier() -> None:
    loss, gradient, metrics = gmpo_row([0.8, -1.0, 0.2], 2.0)
    ratio = math.exp((0.4 - 1.0 + 0.2) / 3)
    assert loss == pytest.approx(-2 * ratio)
    assert gradient == pytest.approx([0.0, -2 * ratio / 3, -2 * ratio / 3])
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)


def test_in_gmpo_a_negative_advantage_clips_only_tokens_that_became_rarer() -> None:
    loss, gradient, _ = gmpo_row([0.8, -1.0, 0.2], -2.0)
    ratio = math.exp((0.8 - 0.3 + 0.2) / 3)
    assert loss == pytest.approx(2 * ratio)
    assert gradient == pytest.approx([2 * ratio / 3, 0.0, 2 * ratio / 3])


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_gmpo_is_the_papers_product_of_minima(advantage: float) -> None:
    """arXiv 2507.20673: (product of |min(rho A, clip(rho) A)|)^(1/n), with the sign of A."""
    log_ratios = [0.9, -0.7, 0.1, -0.2]
    low, high = math.exp(-0.3), math.exp(0.4)
    sign = 1 if advantage > 0 else -1
    terms = [min(math.exp(x) * sign, min(max(math.exp(x), low), high) * sign) for x in log_ratios]
    product = math.prod(abs(term) for term in terms) ** (1 / len(terms))
    assert gmpo_row(log_ratios, advantage)[0] == pytest.approx(-product * advantage)


def test_inside_the_bounds_gmpo_is_gspo_without_a_clip() -> None:
    generator = torch.Generator().manual_seed(1)
    log_ratios_BL = 0.1 * torch.rand(3, 4, generator=generator, dtype=torch.float64)
    zeros_BL, advantages_BL = torch.zeros_like(log_ratios_BL), torch.ones_like(log_ratios_BL)
    batch = (log_ratios_BL, zeros_BL, advantages_BL, advantages_BL)
    ours = gmpo_loss(*batch, clip_low=0.4, clip_high=0.4).loss
    assert ours.item() == pytest.approx(gspo_loss(*batch, clip_low=0.9, clip_high=0.9).loss.item())
