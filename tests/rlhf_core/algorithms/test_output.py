"""A loss and its metrics are shares of a step: they cannot be changed, and the shares of a cut step add up."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from rlhf_core.algorithms.token_math import LossOutput, sft_loss
from rlhf_core.training.batching import reduce


def test_the_shares_of_two_micro_batches_add_up_to_the_step() -> None:
    logprobs_BL = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    mask_BL = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]])
    # (1 + 2 + 3) / 3
    parts = [sft_loss(logprobs_BL[i : i + 1], mask_BL[i : i + 1], tokens=3.0) for i in range(2)]
    assert sum(float(part.loss) for part in parts) == pytest.approx(2.0)
    assert reduce([{"nll": float(part.metrics["nll"])} for part in parts]) == pytest.approx({"nll": 2.0})


def test_an_output_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        LossOutput(torch.zeros(()), {}).loss = torch.ones(())  # type: ignore[misc]
