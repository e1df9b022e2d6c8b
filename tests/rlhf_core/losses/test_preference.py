"""Preference losses against hand-computed numbers on one pair: log-ratios 2 (chosen) and -1 (rejected), so h = 3."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.errors import ConfigError
from rlhf_core.losses.preference import dpo_loss, hinge_loss, ipo_loss, robust_dpo_loss, simpo_loss

PAIR = (torch.tensor([-10.0]), torch.tensor([-21.0]), torch.tensor([-12.0]), torch.tensor([-20.0]))


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def test_dpo_is_minus_log_sigmoid_of_beta_h() -> None:
    output = dpo_loss(*PAIR, beta=0.1, label_smoothing=0.0, pairs=1.0)
    assert output.loss.item() == pytest.approx(softplus(-0.3), rel=1e-6)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    assert metrics == pytest.approx(
        {
            "loss": softplus(-0.3),
            "rewards/chosen": 0.2,
            "rewards/rejected": -0.1,
            "rewards/margin": 0.3,
            "rewards/accuracy": 1.0,
            "logprobs/chosen": -10.0,
            "logprobs/rejected": -21.0,
        },
        rel=1e-6,
    )


def test_label_smoothing_mixes_in_the_flipped_label() -> None:
    loss = dpo_loss(*PAIR, beta=0.1, label_smoothing=0.2, pairs=1.0).loss.item()
    assert loss == pytest.approx(0.8 * softplus(-0.3) + 0.2 * softplus(0.3), rel=1e-6)


def test_robust_dpo_subtracts_the_flipped_label_and_rescales() -> None:
    loss = robust_dpo_loss(*PAIR, beta=0.1, label_smoothing=0.2, pairs=1.0).loss.item()
    assert loss == pytest.approx((0.8 * softplus(-0.3) - 0.2 * softplus(0.3)) / 0.6, rel=1e-6)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    chosen, rejected, ref_chosen, ref_rejected = PAIR
    flipped = (rejected, chosen, ref_rejected, ref_chosen)
    noisy = 0.8 * robust_dpo_loss(*PAIR, beta=0.1, label_smoothing=0.2, pairs=1.0).loss
    noisy = noisy + 0.2 * robust_dpo_loss(*flipped, beta=0.1, label_smoothing=0.2, pairs=1.0).loss
    clean = dpo_loss(*PAIR, beta=0.1, label_smoothing=0.0, pairs=1.0).loss
    assert noisy.item() == pytest.approx(clean.item(), rel=1e-6)


def test_robust_dpo_refuses_labels_that_carry_nothing() -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing = 0\.5"):
        robust_dpo_loss(*PAIR, beta=0.1, label_smoothing=0.5, pairs=1.0)


@pytest.mark.parametrize(("length_average", "h"), [(False, 3.0), (True, 2 / 4 + 1 / 2)])
def test_ipo_regresses_h_to_half_the_inverse_of_beta(length_average: bool, h: float) -> None:
    lengths = (torch.tensor([4]), torch.tensor([2]))
    output = ipo_loss(*PAIR, *lengths, beta=0.25, length_average=length_average, pairs=1.0)
    assert output.loss.item() == pytest.approx((h - 2.0) ** 2, rel=1e-6)
    assert output.metrics["rewards/margin"].item() == pytest.approx(0.25 * h, rel=1e-6)


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 0.7), (0.5, 0.0)])
def test_hinge_stops_at_a_margin_of_one(beta: float, expected: float) -> None:
    assert hinge_loss(*PAIR, beta=beta, pairs=1.0).loss.item() == pytest.approx(expected, abs=1e-6)


def test_simpo_compares_length_normalised_logprobs_with_a_target_margin() -> None:
    # 2 * (-10/4 + 21/6) - 0.5 = 1.5
    output = simpo_loss(PAIR[0], PAIR[1], torch.tensor([4]), torch.tensor([6]), beta=2.0, gamma=0.5, pairs=1.0)
    assert output.loss.item() == pytest.approx(softplus(-1.5), rel=1e-6)
    assert output.metrics["rewards/chosen"].item() == -5.0


def test_a_policy_equal_to_its_reference_has_loss_log_two_and_accuracy_zero() -> None:
    chosen, rejected = PAIR[0], PAIR[1]
    output = dpo_loss(chosen, rejected, chosen, rejected, beta=0.1, label_smoothing=0.0, pairs=1.0)
    assert output.loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert output.metrics["rewards/accuracy"].item() == 0.0
