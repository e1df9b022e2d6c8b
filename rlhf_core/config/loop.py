"""Configure the training loop over a fixed dataset that SFT, reward models and DPO share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from rlhf_core.schema.base import OPERATIONAL, Config


class LoopConfig(Config):
    """The number of passes over the data, and the intervals of evaluation, checkpoints and logging."""

    batch_size: int = Field(32, ge=1)
    """Samples per optimizer step, over all ranks and micro-batches."""
    epochs: int = Field(1, ge=1)
    """Passes over the training data."""
    max_steps: int = Field(0, ge=0)
    """Maximum number of optimizer steps; 0 runs all `epochs`."""
    eval_every: int = Field(50, ge=1)
    """Optimizer steps between evaluations; there is always one at the end."""
    keep_best: int = Field(0, ge=0)
    """Number of checkpoints with the lowest evaluation loss to keep; the best one is the result. 0 uses the last."""
    checkpoint_every: Annotated[int, Field(ge=1), OPERATIONAL] = 50
    """Optimizer steps between checkpoints."""
    log_every: Annotated[int, Field(ge=1), OPERATIONAL] = 1
    """Optimizer steps between points of the training curves."""


def check_best(holds_out: str, fraction: float, loops: Mapping[str, LoopConfig]) -> None:
    """Raise ValueError for a loop that keeps the best checkpoint by rows of which `holds_out` holds none out."""
    for key, loop in loops.items():
        if loop.keep_best and not fraction:
            raise ValueError(
                f"{key}.keep_best = {loop.keep_best}: the best checkpoint is chosen on held-out rows, and there are none; "
                f"raise {holds_out} = {fraction}, or set keep_best to 0"
            )
