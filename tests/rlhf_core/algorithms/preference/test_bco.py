"""BCO against numbers worked by hand, and its running means."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.preference.answers import BCOLoss, RewardShift
from rlhf_core.algorithms.preference.dpo import DPOLoss
from tests.support.losses import of_answers, of_pairs

bco_loss, dpo_loss = of_answers(BCOLoss), of_pairs(DPOLoss)

ROWS = (torch.tensor([-10.0, -21.0]), torch.tensor([-12.0, -20.0]), torch.tensor([True, False]))  # log-ratios 2, -1


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def test_each_answer_is_classified_by_its_reward_against_the_shift() -> None:
    # beta 0.1: rewards 0.2 and -0.1, delta 0.05: logits 0.2 - 0.05 and 0.05 + 0.1
    output = bco_loss(*ROWS, shift=0.05, beta=0.1)
    assert output.loss.item() == pytest.approx((softplus(-0.15) + softplus(-0.15)) / 2, rel=1e-6)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == pytest.approx(
        {"loss": output.loss.item(), "shift": 0.05, "rewards/desirable": 0.2, "rewards/undesirable": -0.1}, rel=1e-6
    )


def test_the_slopes_raise_the_desirable_and_lower_the_other() -> None:
    logprobs_B = ROWS[0].clone().requires_grad_(True)
    bco_loss(logprobs_B, *ROWS[1:], shift=0.05, beta=0.1).loss.backward()
    slope = 0.1 / (1 + math.exp(0.15)) / 2
    assert logprobs_B.grad is not None and logprobs_B.grad.tolist() == pytest.approx([-slope, slope], rel=1e-5)


def test_it_bounds_the_loss_of_dpo_on_a_pair_from_above() -> None:
    """arXiv 2404.04656: -log sigmoid(r_c - r_r) < -log sigmoid(r_c - d) - log sigmoid(d - r_r) for any d."""
    chosen, rejected, ref_chosen, ref_rejected = (ROWS[0][:1], ROWS[0][1:], ROWS[1][:1], ROWS[1][1:])
    dpo = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta=0.1).loss.item()
    for shift in (-2.0, 0.0, 0.05, 3.0):
        assert dpo < 2 * bco_loss(*ROWS, shift=shift, beta=0.1).loss.item()


def test_the_means_run_each_on_its_own_and_start_with_what_is_seen_first() -> None:
    shift = RewardShift().after(desirable=[2.0, 4.0], undesirable=[], decay=0.9)
    assert (shift.desirable, shift.undesirable, shift.delta) == (3.0, None, 3.0)
    shift = shift.after(desirable=[13.0], undesirable=[-1.0], decay=0.9)
    assert (shift.desirable, shift.undesirable) == (pytest.approx(0.9 * 3 + 0.1 * 13), -1.0)
    assert shift.delta == pytest.approx((4.0 - 1.0) / 2)
    assert RewardShift().delta == 0.0


def test_rewards_that_are_not_finite_leave_the_means_alone() -> None:
    seen = RewardShift(3.0, -1.0)
    poisoned = seen.after(desirable=[math.nan, 5.0], undesirable=[math.nan, math.inf], decay=0.5)
    assert poisoned == RewardShift(4.0, -1.0)
    assert RewardShift().after(desirable=[math.nan], undesirable=[], decay=0.5) == RewardShift()
