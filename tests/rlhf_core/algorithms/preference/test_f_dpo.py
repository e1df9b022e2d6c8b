"""f-DPO and length-normalized DPO on one pair: log-ratios 2 (chosen) and -1 (rejected)."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.preference.dpo import Divergence, DPOLoss, DPONormLoss, FDPOLoss
from tests.support.losses import of_pairs

dpo_loss, dpo_norm_loss, f_dpo_loss = of_pairs(DPOLoss), of_pairs(DPONormLoss), of_pairs(FDPOLoss)

PAIR = (torch.tensor([-10.0]), torch.tensor([-21.0]), torch.tensor([-12.0]), torch.tensor([-20.0]))
DERIVATIVES = {
    "reverse_kl": lambda u: math.log(u),
    "forward_kl": lambda u: -1 / u,
    "js": lambda u: math.log(2 * u / (1 + u)),
    "alpha": lambda u: (1 - u**-0.3) / 0.3,
}


@pytest.mark.parametrize("divergence", DERIVATIVES)
def test_the_loss_is_logistic_in_the_derivatives_of_the_divergence(divergence: Divergence) -> None:
    chosen, rejected = (0.1 * DERIVATIVES[divergence](math.exp(x)) for x in (2.0, -1.0))
    output = f_dpo_loss(*PAIR, beta=0.1, divergence=divergence, **({"alpha": 0.3} if divergence == "alpha" else {}))
    assert output.loss.item() == pytest.approx(math.log1p(math.exp(rejected - chosen)), rel=1e-6)
    assert output.metrics["rewards/chosen"].item() == pytest.approx(chosen, rel=1e-5)
    assert output.metrics["rewards/rejected"].item() == pytest.approx(rejected, rel=1e-5)


def test_the_reverse_kl_is_dpo_and_alpha_lies_between_it_and_the_forward_kl() -> None:
    plain = dpo_loss(*PAIR, beta=0.1).loss.item()
    assert f_dpo_loss(*PAIR, beta=0.1, divergence="reverse_kl", alpha=0.5).loss.item() == plain
    x_B = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    near_zero = FDPOLoss(divergence="alpha", alpha=1e-7).derivative(x_B)
    near_one = FDPOLoss(divergence="alpha", alpha=1 - 1e-9).derivative(x_B)
    assert torch.allclose(near_zero, x_B, atol=1e-6)
    assert torch.allclose(near_one, 1 + FDPOLoss(divergence="forward_kl").derivative(x_B), atol=1e-6)


def test_an_answer_that_became_all_but_impossible_gives_finite_numbers() -> None:
    log_u_B = torch.tensor([-500.0, 500.0], requires_grad=True)
    for divergence in ("forward_kl", "js", "alpha"):
        value_B = FDPOLoss(divergence=divergence).derivative(log_u_B)  # type: ignore[arg-type]
        (gradient_B,) = torch.autograd.grad(value_B.sum(), log_u_B)
        assert bool(torch.isfinite(value_B).all()) and bool(torch.isfinite(gradient_B).all())


@pytest.mark.parametrize(("divergence", "log_u"), [("forward_kl", -25.0), ("alpha", -50.0)])
def test_an_answer_beyond_the_bound_is_still_pulled_back(divergence: Divergence, log_u: float) -> None:
    log_u_B = torch.tensor([log_u], requires_grad=True)
    (gradient_B,) = torch.autograd.grad(FDPOLoss(divergence=divergence).derivative(log_u_B).sum(), log_u_B)
    assert gradient_B.item() == pytest.approx(math.exp(20), rel=1e-5)
    lower_B = FDPOLoss(divergence=divergence).derivative(torch.tensor([log_u - 1, log_u]))
    assert lower_B[0] < lower_B[1]


def test_alpha_without_its_divergence_is_refused() -> None:
    with pytest.raises(ValidationError, match=r'alpha = 0\.3: applies only to divergence = "alpha"'):
        FDPOLoss(divergence="js", alpha=0.3)
    again = FDPOLoss.model_validate(FDPOLoss(divergence="js").model_dump())
    assert again.divergence == "js"


def test_length_normalized_dpo_compares_means_of_log_ratios() -> None:
    lengths = {"chosen_lengths": torch.tensor([4]), "rejected_lengths": torch.tensor([2])}
    output = dpo_norm_loss(*PAIR, **lengths, beta=2.0)
    # 2 (2 / 4 - (-1) / 2) = 2
    assert output.loss.item() == pytest.approx(math.log1p(math.exp(-2.0)), rel=1e-6)
    assert output.metrics["rewards/chosen"].item() == pytest.approx(1.0)
    same = {"chosen_lengths": torch.ones(1), "rejected_lengths": torch.ones(1)}
    assert dpo_norm_loss(*PAIR, **same, beta=0.1).loss.item() == pytest.approx(dpo_loss(*PAIR, beta=0.1).loss.item())
    zero = torch.zeros(1)
    empty = {"chosen_lengths": torch.zeros(1), "rejected_lengths": torch.ones(1)}
    assert dpo_norm_loss(zero, zero, zero, zero, **empty, beta=2.0).loss.item() == pytest.approx(math.log(2))
