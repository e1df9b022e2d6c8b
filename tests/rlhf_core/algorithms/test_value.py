"""The clipped value loss and the explained variance."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.algorithms.token_math import clipped_value_loss, explained_variance


def test_the_worse_of_the_clipped_and_the_plain_error_counts() -> None:
    # token 0: V=1, old 0, R=2: clipped 0.2 -> 3.24 beats 1; token 1: V=0.1, old 0, R=0: inside the clip -> 0.01
    output = clipped_value_loss(
        torch.tensor([[1.0, 0.1, 9.0]]),
        torch.tensor([[0.0, 0.0, 0.0]]),
        torch.tensor([[2.0, 0.0, 0.0]]),
        torch.tensor([[1, 1, 0]]),
        clip=0.2,
    )
    assert output.loss.item() == pytest.approx(0.5 * (3.24 + 0.01) / 2, rel=1e-6)
    assert output.metrics["value_clip_fraction"].item() == 0.5
    assert output.metrics["value_mean"].item() == pytest.approx(0.55)


def test_a_clipped_value_has_no_gradient_and_a_plain_one_has_the_error() -> None:
    values_BL = torch.tensor([[1.0, 0.1]], requires_grad=True)
    clipped_value_loss(
        values_BL, torch.zeros(1, 2), torch.tensor([[2.0, 0.0]]), torch.ones(1, 2), clip=0.2
    ).loss.backward()
    assert values_BL.grad is not None and values_BL.grad[0].tolist() == pytest.approx([0.0, 0.05])


def test_without_a_clip_it_is_half_the_mean_squared_error() -> None:
    output = clipped_value_loss(
        torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), clip=None
    )
    assert output.loss.item() == 2.5  # 0.5 * (1 + 9) / 2
    assert output.metrics["value_clip_fraction"].item() == 0.0


def test_explained_variance_is_one_for_perfect_values_and_zero_for_a_constant() -> None:
    returns_BL, mask_BL = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns_BL, returns_BL, mask_BL) == 1.0
    assert explained_variance(torch.full((1, 4), 2.0), returns_BL, mask_BL) == 0.0
    # values (1, 2, 2): residuals (0, 0, 1), variance 2/9 against 2/3
    assert explained_variance(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), returns_BL, mask_BL) == pytest.approx(2 / 3)


def test_returns_that_do_not_vary_leave_nothing_to_explain() -> None:
    assert explained_variance(torch.randn(1, 3), torch.ones(1, 3), torch.ones(1, 3)) == 0.0


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_matches_a_slow_loop(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(2)
    values, old, returns = (torch.randn(4, 6, generator=generator) for _ in range(3))
    mask = torch.rand(4, 6, generator=generator) > 0.4
    terms = []
    for b, t in mask.nonzero().tolist():
        v, o, r = values[b, t].item(), old[b, t].item(), returns[b, t].item()
        clipped = v if clip is None else o + min(max(v - o, -clip), clip)
        terms.append(0.5 * max((clipped - r) ** 2, (v - r) ** 2))
    loss = clipped_value_loss(values, old, returns, mask, clip=clip).loss.item()
    assert loss == pytest.approx(sum(terms) / len(terms), rel=1e-6)


def test_the_denominator_is_the_step_where_it_is_given() -> None:
    ones_BL = torch.ones(1, 2)
    assert clipped_value_loss(ones_BL, ones_BL, 0 * ones_BL, ones_BL, clip=0.2, num_tokens=8.0).loss.item() == 0.125
