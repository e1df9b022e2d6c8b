"""Compute the learning rate of every optimizer step as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal, assert_never

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import ConfigError, explain

Schedule = Literal["cosine", "linear", "constant"]


def learning_rate(
    step: int, *, total_steps: int, peak: float, schedule: Schedule, warmup_fraction: float, min_fraction: float
) -> float:
    """Return the rate of optimizer step `step` (0-based) of `total_steps`, the exact number of optimizer steps.

    The warm-up takes ceil(warmup_fraction * total_steps) steps. Its first rate is above zero, and its last is the peak.
    The rate then falls from `peak` towards `min_fraction * peak`, which it would reach at step `total_steps`. The rate
    of the last step is still above it, so that no step is wasted with `min_fraction` 0. Raises ConfigError if `step` is
    not one of `total_steps`.

    >>> learning_rate(0, total_steps=10, peak=1.0, schedule="linear", warmup_fraction=0.2, min_fraction=0.0)
    0.5
    """
    if not 0 <= step < total_steps:
        raise ConfigError(
            explain(
                "step", step, f"must be in [0, total_steps = {total_steps})", "set total_steps to the number of steps"
            )
        )
    # Rounded before ceil: 0.07 * 100 is 7.000000000000001 in binary.
    warmup = math.ceil(round(warmup_fraction * total_steps, 9))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / (total_steps - warmup)
    match schedule:
        case "constant":
            return peak
        case "linear":
            remaining = 1 - progress
        case "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(schedule)
    return peak * (min_fraction + (1 - min_fraction) * remaining)


def scheduled_rate(optimizer: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the `learning_rate` of a step for an optimizer configuration."""
    return learning_rate(
        step,
        total_steps=total_steps,
        peak=optimizer.learning_rate,
        schedule=optimizer.schedule,
        warmup_fraction=optimizer.warmup_fraction,
        min_fraction=optimizer.min_lr_fraction,
    )
