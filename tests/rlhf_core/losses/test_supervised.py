"""The supervised loss."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.losses.supervised import sft_loss


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
