"""What every loss returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss and of the metrics of one optimizer step.

    Every loss takes the denominators of the whole optimizer step (all micro-batches, all ranks) and returns partial
    sums that are already divided by them: adding the outputs of all micro-batches gives the step's loss and metrics,
    so neither depends on how the step was cut. A metric whose name ends in `_max` is combined by max instead.

    `metrics` are detached scalars.

    >>> import torch
    >>> LossOutput(loss=torch.tensor(0.5), metrics={"nll": torch.tensor(0.5)}).metrics["nll"].item()
    0.5
    """

    loss: Tensor
    metrics: dict[str, Tensor]
