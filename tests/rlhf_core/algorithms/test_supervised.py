"""The supervised loss."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.algorithms.token_math import sft_loss


def test_the_loss_is_the_mean_over_trained_tokens_only() -> None:
    logprobs_BL = torch.tensor([[-1.0, -2.0, -50.0], [-3.0, -50.0, -50.0]])
    output = sft_loss(logprobs_BL, torch.tensor([[1, 1, 0], [1, 0, 0]]), tokens=3.0)
    assert output.loss.item() == 2.0  # (1 + 2 + 3) / 3
    assert output.metrics["nll"].item() == 2.0


def test_the_denominator_is_the_step_and_not_this_micro_batch() -> None:
    assert sft_loss(torch.tensor([[-1.0, -2.0]]), torch.ones(1, 2), tokens=12.0).loss.item() == pytest.approx(0.25)


def test_the_gradient_is_minus_one_over_tokens_on_the_mask() -> None:
    logprobs_BL = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    sft_loss(logprobs_BL, torch.tensor([[0, 1, 1]]), tokens=4.0).loss.backward()
    assert logprobs_BL.grad is not None and logprobs_BL.grad.tolist() == [[0.0, -0.25, -0.25]]


def test_without_a_denominator_the_call_is_the_step() -> None:
    assert sft_loss(torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[1, 1, 0]])).loss.item() == 1.5


def test_dft_weighs_each_token_by_its_own_probability_which_has_no_gradient() -> None:
    # p = 1/2 and 1/4: loss (ln 2 / 2 + ln 4 / 4) / 2 = (ln 2) / 2; gradient -p / 2
    logprobs_BL = torch.tensor([[math.log(0.5), math.log(0.25)]], requires_grad=True)
    output = sft_loss(logprobs_BL, torch.ones(1, 2), dft=True)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(math.log(2) / 2, rel=1e-6)
    assert output.metrics["nll"].item() == pytest.approx(1.5 * math.log(2), rel=1e-6)  # the plain mean, to compare runs
    assert logprobs_BL.grad is not None and logprobs_BL.grad[0].tolist() == pytest.approx([-0.25, -0.125], rel=1e-6)


@pytest.mark.parametrize("dft", [False, True])
def test_the_loss_matches_a_slow_loop(dft: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    logprobs_BL = torch.randn(5, 6, generator=generator) - 2
    mask_BL = torch.rand(5, 6, generator=generator) > 0.5
    at = [logprobs_BL[b, t].item() for b, t in mask_BL.nonzero().tolist()]
    expected = sum(-x * (math.exp(x) if dft else 1.0) for x in at) / len(at)
    assert sft_loss(logprobs_BL, mask_BL, dft=dft).loss.item() == pytest.approx(expected, rel=1e-6)
