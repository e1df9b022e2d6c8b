"""Preference losses against hand-computed numbers on one pair: log-ratios 2 (chosen) and -1 (rejected), so h = 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.preference.anchored import APODownLoss, APOZeroLoss, NCALoss, SPPOLoss
from rlhf_core.algorithms.preference.base import length_desensitised
from rlhf_core.algorithms.preference.dpo import (
    CDPOLoss,
    DiscoPOPLoss,
    DPOLoss,
    EXOLoss,
    HingeLoss,
    IPOLoss,
    RobustDPOLoss,
)
from tests.support.losses import of_pairs

apo_zero_loss, apo_down_loss = of_pairs(APOZeroLoss), of_pairs(APODownLoss)
sppo_loss, nca_loss = of_pairs(SPPOLoss), of_pairs(NCALoss)
dpo_loss, cdpo_loss, robust_dpo_loss = of_pairs(DPOLoss), of_pairs(CDPOLoss), of_pairs(RobustDPOLoss)
ipo_loss, hinge_loss = of_pairs(IPOLoss), of_pairs(HingeLoss)
exo_loss, discopop_loss = of_pairs(EXOLoss), of_pairs(DiscoPOPLoss)

PAIR = (torch.tensor([-10.0]), torch.tensor([-21.0]), torch.tensor([-12.0]), torch.tensor([-20.0]))


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_dpo_is_minus_log_sigmoid_of_beta_h() -> None:
    output = dpo_loss(*PAIR, beta=0.1, pairs=1.0)
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
    loss = cdpo_loss(*PAIR, beta=0.1, label_smoothing=0.2, pairs=1.0).loss.item()
    assert loss == pytest.approx(0.8 * softplus(-0.3) + 0.2 * softplus(0.3), rel=1e-6)


def test_robust_dpo_subtracts_the_flipped_label_and_rescales() -> None:
    loss = robust_dpo_loss(*PAIR, beta=0.1, label_smoothing=0.2, pairs=1.0).loss.item()
    assert loss == pytest.approx((0.8 * softplus(-0.3) - 0.2 * softplus(0.3)) / 0.6, rel=1e-6)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    chosen, rejected, ref_chosen, ref_rejected = PAIR
    flipped = (rejected, chosen, ref_rejected, ref_chosen)
    noisy = 0.8 * robust_dpo_loss(*PAIR, beta=0.1, label_smoothing=0.2, pairs=1.0).loss
    noisy = noisy + 0.2 * robust_dpo_loss(*flipped, beta=0.1, label_smoothing=0.2, pairs=1.0).loss
    clean = dpo_loss(*PAIR, beta=0.1, pairs=1.0).loss
    assert noisy.item() == pytest.approx(clean.item(), rel=1e-6)


@pytest.mark.parametrize(("kind", "label_smoothing"), [(RobustDPOLoss, 0.5), (EXOLoss, 0.0), (EXOLoss, 1.0)])
def test_labels_without_which_a_loss_is_infinite_are_refused(kind: Any, label_smoothing: float) -> None:
    with pytest.raises(ValidationError, match="label_smoothing"):
        kind(label_smoothing=label_smoothing)


@pytest.mark.parametrize(("length_average", "h"), [(False, 3.0), (True, 2 / 4 + 1 / 2)])
def test_ipo_regresses_h_to_half_the_inverse_of_beta(length_average: bool, h: float) -> None:
    lengths = {"chosen_lengths": torch.tensor([4]), "rejected_lengths": torch.tensor([2])}
    output = ipo_loss(*PAIR, **lengths, beta=0.25, length_average=length_average, pairs=1.0)
    assert output.loss.item() == pytest.approx((h - 2.0) ** 2, rel=1e-6)
    assert output.metrics["rewards/margin"].item() == pytest.approx(0.25 * h, rel=1e-6)


@pytest.mark.parametrize(("beta", "expected"), [(0.1, 0.7), (0.5, 0.0)])
def test_hinge_stops_at_a_margin_of_one(beta: float, expected: float) -> None:
    assert hinge_loss(*PAIR, beta=beta, pairs=1.0).loss.item() == pytest.approx(expected, abs=1e-6)


def test_a_policy_equal_to_its_reference_has_loss_log_two_and_accuracy_zero() -> None:
    chosen, rejected = PAIR[0], PAIR[1]
    output = dpo_loss(chosen, rejected, chosen, rejected, beta=0.1, pairs=1.0)
    assert output.loss.item() == pytest.approx(math.log(2), rel=1e-6)
    assert output.metrics["rewards/accuracy"].item() == 0.0


def test_apo_zero_moves_both_answers_and_apo_down_lowers_both() -> None:
    # beta a = 0.2, beta b = -0.1, beta h = 0.3
    loss = apo_zero_loss(*PAIR, beta=0.1).loss.item()
    assert loss == pytest.approx(1 - sigmoid(0.2) + sigmoid(-0.1), rel=1e-6)
    loss = apo_down_loss(*PAIR, beta=0.1).loss.item()
    assert loss == pytest.approx(sigmoid(0.2) + 1 - sigmoid(0.3), rel=1e-6)


def test_sppo_regresses_each_answer_to_its_own_target() -> None:
    # beta 0.5: targets 1 and -1; (2 - 1)^2 + (-1 + 1)^2 = 1
    output = sppo_loss(*PAIR, beta=0.5)
    assert output.loss.item() == pytest.approx(1.0, rel=1e-6)
    assert output.metrics["rewards/chosen"].item() == pytest.approx(1.0, rel=1e-6)


def test_nca_contrasts_each_answer_with_the_reference() -> None:
    # -log sig(0.2) - log sig(-0.2) / 2 - log sig(0.1) / 2
    expected = softplus(-0.2) + softplus(0.2) / 2 + softplus(-0.1) / 2
    assert nca_loss(*PAIR, beta=0.1).loss.item() == pytest.approx(expected, rel=1e-6)


def test_exo_is_the_reverse_kl_to_the_smoothed_label() -> None:
    p = sigmoid(0.3)
    expected = p * math.log(p / 0.9) + (1 - p) * math.log((1 - p) / 0.1)
    assert exo_loss(*PAIR, beta=0.1, label_smoothing=0.1).loss.item() == pytest.approx(expected, rel=1e-6)


def test_exo_is_zero_where_the_policy_has_the_label_s_probability() -> None:
    # sigmoid(beta h) = 0.9 at beta h = log 9
    beta = math.log(9) / 3
    assert exo_loss(*PAIR, beta=beta, label_smoothing=0.1).loss.item() == pytest.approx(0.0, abs=1e-6)


def test_discopop_blends_the_logistic_and_the_exponential_loss() -> None:
    # beta h = 0.03, tau = 0.05: m = sigmoid(0.6)
    m = sigmoid(0.6)
    expected = (1 - m) * softplus(-0.03) + m * math.exp(-0.03)
    assert discopop_loss(*PAIR, beta=0.01, tau=0.05).loss.item() == pytest.approx(expected, rel=1e-6)


def test_discopop_is_finite_far_on_the_wrong_side() -> None:
    # exp(-beta h) alone would overflow at h = -1000 and poison the sum: inf * 0
    chosen = torch.tensor([-1000.0], requires_grad=True)
    zero = torch.zeros(1)
    output = discopop_loss(chosen, zero, zero, zero, beta=1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1000.0, rel=1e-6)
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-1.0, rel=1e-6)


SLOW: dict[str, tuple[Callable[..., Any], dict[str, float], Callable[[float, float], float]]] = {
    # the loss, its scalars, and the term of one pair from x = beta a and y = beta b, beta = 0.1
    "dpo": (dpo_loss, {}, lambda x, y: softplus(y - x)),
    "cdpo": (cdpo_loss, {"label_smoothing": 0.2}, lambda x, y: 0.8 * softplus(y - x) + 0.2 * softplus(x - y)),
    "robust": (
        robust_dpo_loss,
        {"label_smoothing": 0.2},
        lambda x, y: (0.8 * softplus(y - x) - 0.2 * softplus(x - y)) / 0.6,
    ),
    "ipo": (ipo_loss, {"length_average": False}, lambda x, y: (10 * (x - y) - 5) ** 2),
    "hinge": (hinge_loss, {}, lambda x, y: max(0.0, 1 - (x - y))),
    "apo_zero": (apo_zero_loss, {}, lambda x, y: 1 - sigmoid(x) + sigmoid(y)),
    "apo_down": (apo_down_loss, {}, lambda x, y: sigmoid(x) + 1 - sigmoid(x - y)),
    "sppo": (sppo_loss, {}, lambda x, y: (10 * x - 5) ** 2 + (10 * y + 5) ** 2),
    "nca": (nca_loss, {}, lambda x, y: softplus(-x) + softplus(x) / 2 + softplus(y) / 2),
    "exo": (
        exo_loss,
        {"label_smoothing": 1e-3},
        lambda x, y: (
            sigmoid(x - y) * math.log(sigmoid(x - y) / 0.999) + sigmoid(y - x) * math.log(sigmoid(y - x) / 0.001)
        ),
    ),
    "discopop": (
        discopop_loss,
        {"tau": 0.05},
        lambda x, y: sigmoid((y - x) / 0.05) * softplus(y - x) + sigmoid((x - y) / 0.05) * math.exp(y - x),
    ),
}


@pytest.mark.parametrize("name", SLOW)
def test_the_loss_matches_a_slow_loop_over_pairs(name: str) -> None:
    loss, scalars, term = SLOW[name]
    generator = torch.Generator().manual_seed(11)
    columns = [8 * torch.randn(20, generator=generator) - 30 for _ in range(4)]
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = sum(term(0.1 * (c - rc), 0.1 * (r - rr)) for c, r, rc, rr in rows) / 20
    output = loss(*columns, beta=0.1, **scalars)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    accuracy = sum(c - rc > r - rr for c, r, rc, rr in rows) / 20
    assert output.metrics["rewards/accuracy"].item() == pytest.approx(accuracy, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in SLOW if name != "apo_down"])
def test_a_step_of_descent_raises_the_margin(name: str) -> None:
    loss, scalars, _ = SLOW[name]
    columns = [column.clone().requires_grad_(i < 2) for i, column in enumerate(PAIR)]
    loss(*columns, beta=0.1, **scalars).loss.backward()
    chosen, rejected = columns[0].grad, columns[1].grad
    assert chosen is not None and rejected is not None
    assert chosen.item() < rejected.item()


LOGPROBS_BL = torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0]])
MASK_BL = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]])  # lengths 3 and 2


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (1.0, [-9.0, -4.0]),  # the plain sums
        (0.5, [-2 - 0.5 * 3 - 0.5 * 4, -4.0]),  # the other answers have 1 and 5 tokens
        (0.0, [-2.0, -4.0]),
    ],
)
def test_tokens_beyond_the_shorter_answer_count_alpha(alpha: float, expected: list[float]) -> None:
    other_BL = torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 1]])
    assert length_desensitised(LOGPROBS_BL, MASK_BL, other_BL, alpha=alpha).tolist() == expected


def test_length_desensitised_sums_ignore_what_stands_outside_the_mask() -> None:
    dirty_BL = torch.where(MASK_BL != 0, LOGPROBS_BL, float("nan")).requires_grad_(True)
    sums_B = length_desensitised(dirty_BL, MASK_BL, torch.tensor([[1], [1]]), alpha=0.5)
    sums_B.sum().backward()
    assert sums_B.tolist() == [-5.5, -2.5]
    assert dirty_BL.grad is not None and dirty_BL.grad.tolist() == [[0.0, 1.0, 0.5, 0.5], [1.0, 0.0, 0.5, 0.0]]
