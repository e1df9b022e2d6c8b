"""KTO against numbers worked by hand and a slow loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_core.algorithms.preference.answers import KTOLoss, kto_kl
from tests.support.losses import of_answers

kto_loss = of_answers(KTOLoss)

ROWS = (torch.tensor([-10.0, -21.0]), torch.tensor([-12.0, -20.0]), torch.tensor([True, False]))  # log-ratios 2, -1
SCALARS: dict[str, Any] = {"kl": 0.5, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_each_kind_of_row_is_held_against_the_reference_point() -> None:
    # desirable: 1 - sigmoid(0.1 * (2 - 0.5)); undesirable: 1.5 * (1 - sigmoid(0.1 * (0.5 + 1)))
    output = kto_loss(*ROWS, **SCALARS)
    assert output.loss.item() == pytest.approx(2.5 * (1 - sigmoid(0.15)) / 2, rel=1e-6)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == pytest.approx(
        {"loss": output.loss.item(), "kl": 0.5, "rewards/desirable": 0.2, "rewards/undesirable": -0.1}, rel=1e-6
    )


def test_a_step_raises_desirable_answers_and_lowers_the_others() -> None:
    logprobs = ROWS[0].clone().requires_grad_(True)
    kto_loss(logprobs, *ROWS[1:], **SCALARS).loss.backward()
    slope = 0.1 * sigmoid(0.15) * (1 - sigmoid(0.15)) / 2
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-slope, 1.5 * slope], rel=1e-5)


def test_the_labels_may_be_numbers() -> None:
    as_numbers = kto_loss(ROWS[0], ROWS[1], torch.tensor([1.0, 0.0]), **SCALARS)
    assert as_numbers.loss.item() == kto_loss(*ROWS, **SCALARS).loss.item()


def test_a_step_without_undesirable_rows_reports_zero_for_them() -> None:
    output = kto_loss(ROWS[0], ROWS[1], torch.tensor([True, True]), **SCALARS)
    assert output.metrics["rewards/undesirable"].item() == 0.0
    assert output.metrics["rewards/desirable"].item() == pytest.approx(0.05, rel=1e-6)


def test_the_means_of_a_part_need_the_counts_of_the_step() -> None:
    # one desirable row here, of two desirable and two undesirable ones in the step
    part = (ROWS[0][:1], ROWS[1][:1], ROWS[2][:1])
    metrics = kto_loss(*part, **SCALARS, rows=4.0, desirable_rows=2.0).metrics
    assert metrics["rewards/desirable"].item() == pytest.approx(0.1, rel=1e-6)
    assert metrics["kl"].item() == 0.125


def test_the_loss_matches_a_slow_loop() -> None:
    generator = torch.Generator().manual_seed(13)
    logprobs, ref = (8 * torch.randn(20, generator=generator) - 30 for _ in range(2))
    desirable = torch.rand(20, generator=generator) > 0.4
    terms = [
        1.0 * (1 - sigmoid(0.1 * (a - b - 0.5))) if good else 1.5 * (1 - sigmoid(0.1 * (0.5 - (a - b))))
        for a, b, good in zip(logprobs.tolist(), ref.tolist(), desirable.tolist(), strict=True)
    ]
    assert kto_loss(logprobs, ref, desirable, **SCALARS).loss.item() == pytest.approx(sum(terms) / 20, rel=1e-6)


def test_the_reference_point_is_the_mean_log_ratio_and_never_negative() -> None:
    logprobs = torch.tensor([-9.0, -10.0], requires_grad=True)
    assert kto_kl(logprobs, torch.tensor([-12.0, -9.0])).item() == 1.0  # (3 - 1) / 2
    assert kto_kl(logprobs, torch.tensor([-8.0, -9.0])).item() == 0.0  # -1, clamped after the mean
    assert not kto_kl(logprobs, torch.tensor([-12.0, -9.0])).requires_grad
    assert kto_kl(torch.zeros(0), torch.zeros(0)).item() == 0.0


def trl_kto(
    logprobs: torch.Tensor,
    ref: torch.Tensor,
    kl_logprobs: torch.Tensor,
    ref_kl_logprobs: torch.Tensor,
    good: torch.Tensor,
    *,
    beta: float,
    weights: tuple[float, float],
) -> torch.Tensor:
    """`KTOTrainer.kto_loss` of TRL and what `get_batch_loss_metrics` makes of it, written down from there."""
    kl = (kl_logprobs - ref_kl_logprobs).mean().detach().clamp(min=0)
    chosen_losses = 1 - torch.sigmoid(beta * (logprobs[good] - ref[good] - kl))
    rejected_losses = 1 - torch.sigmoid(beta * (kl - (logprobs[~good] - ref[~good])))
    return torch.cat((weights[0] * chosen_losses, weights[1] * rejected_losses), 0).nanmean()


@pytest.mark.parametrize("good", [[True] * 5 + [False] * 2, [True] + [False] * 6, [True] * 7, [False] * 7])
def test_loss_and_gradient_on_unpaired_rows_are_those_of_trl(good: list[bool]) -> None:
    generator = torch.Generator().manual_seed(5)
    rows = [3 * torch.randn(7, generator=generator, dtype=torch.float64) - 30 for _ in range(4)]
    logprobs, ref, kl_logprobs, ref_kl_logprobs = rows
    logprobs.requires_grad_(True)
    desirable = torch.tensor(good)
    expected = trl_kto(logprobs, ref, kl_logprobs + 2, ref_kl_logprobs, desirable, beta=0.3, weights=(1.3, 0.7))
    (slope,) = torch.autograd.grad(expected, logprobs)
    kl = float(kto_kl(kl_logprobs + 2, ref_kl_logprobs))
    scalars: dict[str, Any] = {"kl": kl, "beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    # In micro-batches of two: the counts are those of the step.
    parts = [
        kto_loss(
            logprobs[i : i + 2], ref[i : i + 2], desirable[i : i + 2], rows=7.0, desirable_rows=1.0, **scalars
        ).loss
        for i in range(0, 7, 2)
    ]
    (own,) = torch.autograd.grad(sum(parts), logprobs)  # type: ignore[arg-type]
    # float64: a sum of seven terms of order 1
    assert float(sum(parts)) == pytest.approx(expected.item(), abs=1e-15 * 16)
    torch.testing.assert_close(own, slope, rtol=0, atol=1e-15)
