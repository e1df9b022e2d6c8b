"""The clipped policy loss, against a slow float64 loop and cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.losses.output import LossOutput
from rlhf_core.losses.policy import aggregate, ppo_clip_loss

DEFAULTS: dict[str, Any] = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": None,
    "aggregation": "token_mean",
    "sequences": 1.0,
    "max_length": 8.0,
}


def one_token(ratio: float, advantage: float, *, dual_clip: float | None = None) -> tuple[LossOutput, float]:
    """The loss of a single token with that probability ratio, and its gradient by log pi."""
    logprobs_BL = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    one_BL = torch.ones(1, 1, dtype=torch.float64)
    output = ppo_clip_loss(
        logprobs_BL,
        0 * one_BL,
        advantage * one_BL,
        one_BL,
        one_BL,
        **DEFAULTS | {"dual_clip": dual_clip, "tokens": 1.0},
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


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])
def test_the_loss_matches_a_slow_loop(aggregation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    new, old, adv = (torch.randn(5, 7, generator=generator) for _ in range(3))
    weights = torch.rand(5, 7, generator=generator) * 2
    mask = torch.rand(5, 7, generator=generator) > 0.5
    mask[2] = False  # a row without a trained token
    arguments = DEFAULTS | {"dual_clip": 3.0, "aggregation": aggregation, "sequences": 5.0}
    output = ppo_clip_loss(new, old, adv, mask, weights, **arguments, tokens=float(mask.sum()))
    assert output.loss.item() == pytest.approx(slow_loss(new, old, adv, mask, weights, aggregation), rel=1e-5)


def test_before_the_first_update_the_ratio_is_exactly_one() -> None:
    logprobs_BL = torch.tensor([[-0.1, -7.3, -2.2]])
    ones_BL = torch.ones(1, 3)
    output = ppo_clip_loss(logprobs_BL, logprobs_BL.clone(), ones_BL, ones_BL, ones_BL, **DEFAULTS, tokens=3.0)
    assert output.metrics["ratio_max"].item() == 1.0
    assert output.metrics["approx_kl"].item() == 0.0
    assert output.metrics["clip_fraction"].item() == 0.0


def test_approx_kl_is_k3_of_old_against_new() -> None:
    # tokens come from the old policy: d = log old - log new = -0.4; k3 = e^0.4 - 1 - 0.4
    ones_BL = torch.ones(1, 1)
    output = ppo_clip_loss(
        torch.tensor([[-1.0]]), torch.tensor([[-1.4]]), ones_BL, ones_BL, ones_BL, **DEFAULTS, tokens=1.0
    )
    assert output.metrics["approx_kl"].item() == pytest.approx(math.exp(0.4) - 1.4, rel=1e-5)


def test_importance_weights_scale_the_loss_without_a_gradient_of_their_own() -> None:
    logprobs_BL = torch.zeros(1, 2, requires_grad=True)
    weights_BL = torch.tensor([[0.5, 0.0]], requires_grad=True)
    ones_BL = torch.ones(1, 2)
    output = ppo_clip_loss(logprobs_BL, torch.zeros(1, 2), ones_BL, ones_BL, weights_BL, **DEFAULTS, tokens=2.0)
    output.loss.backward()
    assert output.loss.item() == -0.25  # the dropped token stays in the denominator
    assert weights_BL.grad is None
    assert logprobs_BL.grad is not None and logprobs_BL.grad.tolist() == [[-0.25, 0.0]]


def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient() -> None:
    nan = float("nan")
    logprobs_BL = torch.tensor([[0.0, nan]], requires_grad=True)
    mask_BL = torch.tensor([[1, 0]])
    output = ppo_clip_loss(
        logprobs_BL, torch.zeros(1, 2), torch.tensor([[1.0, nan]]), mask_BL, torch.ones(1, 2), **DEFAULTS, tokens=1.0
    )
    output.loss.backward()
    assert output.loss.item() == -1.0
    assert logprobs_BL.grad is not None and logprobs_BL.grad.tolist() == [[-1.0, 0.0]]


def test_the_three_aggregations_weigh_long_and_short_rows_as_named() -> None:
    x_BL, mask_BL = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    scalars = {"tokens": 4.0, "sequences": 2.0, "max_length": 8.0}
    assert aggregate(x_BL, mask_BL, aggregation="token_mean", **scalars).item() == 2.0  # 8 / 4
    assert aggregate(x_BL, mask_BL, aggregation="seq_mean_token_mean", **scalars).item() == 3.0  # (1 + 5) / 2
    assert aggregate(x_BL, mask_BL, aggregation="seq_mean_token_sum_norm", **scalars).item() == 0.5  # 8 / (2 * 8)
