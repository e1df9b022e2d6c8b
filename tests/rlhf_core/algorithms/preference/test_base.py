"""What losses on pairs report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_core.algorithms.preference.base import PairBatch, pair_output

COLUMNS = (
    torch.tensor([1.0, 3.0], requires_grad=True),
    torch.tensor([0.5, -1.0]),
    torch.tensor([0.5, 2.0]),
)
ONES = torch.ones(2)
BATCH = PairBatch(
    chosen_logprobs=torch.tensor([-10.0, -20.0]), rejected_logprobs=torch.tensor([-30.0, -50.0]), ref_chosen_logprobs=ONES,
    ref_rejected_logprobs=ONES, chosen_lengths=ONES, rejected_lengths=ONES, pairs=2.0, tokens=2.0,
)  # fmt: skip


def test_the_metrics_are_means_over_the_pairs() -> None:
    output = pair_output(*COLUMNS, BATCH)
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(
        {
            "loss": 2.0,
            "rewards/chosen": -0.25,
            "rewards/rejected": 1.25,
            "rewards/margin": -1.5,
            "rewards/accuracy": 0.0,  # a margin of 0 in the first pair is no success
            "logprobs/chosen": -15.0,
            "logprobs/rejected": -40.0,
        }
    )
    assert output.loss.requires_grad and not any(value.requires_grad for value in output.metrics.values())


def test_the_pairs_of_the_step_divide_everything() -> None:
    output = pair_output(*COLUMNS, replace(BATCH, pairs=8.0))
    assert output.loss.item() == 0.5
    assert output.metrics["logprobs/rejected"].item() == -10.0
