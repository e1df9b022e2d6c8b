"""Shape a composed reward: running normalization, clip, and the penalties for truncated and overlong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, assert_never

STD_EPS = 1e-8  # (r - mean) / (std + eps)


@dataclass(frozen=True)
class RunningNormalizer:
    """Mean and variance of all rewards so far (Welford; merged by Chan et al., 1979). JSON-able by `asdict`.

    >>> RunningNormalizer.empty().updated([1.0, 3.0])
    RunningNormalizer(count=2, mean=2.0, squares=2.0)
    """

    count: int
    mean: float
    squares: float
    """Sum of squared distances to the mean."""

    @classmethod
    def empty(cls) -> RunningNormalizer:
        """A normalizer without observations."""
        return cls(count=0, mean=0.0, squares=0.0)

    def updated(self, values: Sequence[float]) -> RunningNormalizer:
        """The normalizer with `values` added to its statistics."""
        if not values:
            return self
        mean, size = fmean(values), len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        count, difference = self.count + size, mean - self.mean
        return RunningNormalizer(
            count=count,
            mean=self.mean + difference * size / count,
            squares=self.squares + squares + difference**2 * self.count * size / count,
        )

    def normalized(self, values: Sequence[float]) -> list[float]:
        """Normalize (value - mean) / std by the values so far; 0.0 while they do not vary."""
        std = math.sqrt(self.squares / self.count) if self.count else 0.0
        return [(value - self.mean) / (std + STD_EPS) if std > 0 else 0.0 for value in values]


def clipped(values: Sequence[float], *, limit: float) -> list[float]:
    """Clip the values to +-limit.

    >>> clipped([-9.0, 0.5, 9.0], limit=5.0)
    [-5.0, 0.5, 5.0]
    """
    return [min(max(value, -limit), limit) for value in values]


def linear_weight(step: int, *, start: float, end: float, steps: int) -> float:
    """Interpolate the weight at `step`: in a straight line from `start` at step 0 to `end` at `steps`, then `end`.

    >>> linear_weight(5, start=1.0, end=0.0, steps=20)
    0.75
    """
    return start + (end - start) * min(step / steps, 1.0)


def soft_overlong(length: int, *, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """Penalty <= 0 of an answer of `length` tokens: DAPO, arXiv 2503.14476 eq. 13.

    0 up to max_tokens - buffer_tokens, then falling linearly to -factor at max_tokens, and no lower.

    >>> soft_overlong(95, max_tokens=100, buffer_tokens=20, factor=1.0)
    -0.75
    """
    over = length - (max_tokens - buffer_tokens)
    if over <= 0:
        return 0.0
    return -factor * min(over / buffer_tokens, 1.0)


def truncated_reward(reward: float, *, kind: Literal["scale", "penalty", "value"], amount: float) -> float:
    """Adjust the reward of an answer that was cut off at the token limit.

    >>> truncated_reward(2.0, kind="scale", amount=0.25), truncated_reward(-2.0, kind="scale", amount=0.25)
    (0.5, -2.0)
    >>> truncated_reward(2.0, kind="penalty", amount=0.5), truncated_reward(2.0, kind="value", amount=-1.0)
    (1.5, -1.0)
    """
    match kind:
        case "scale":
            # A negative reward times a factor below 1 would be a bonus for being cut off.
            return reward * amount if reward > 0 else reward
        case "penalty":
            return reward - amount
        case "value":
            return amount
        case _:
            assert_never(kind)
