"""The monitor of over-optimization: the reward that is trained on rises while what it stands for falls.

Gao, Schulman, Hilton, "Scaling Laws for Reward Model Overoptimization", arXiv 2210.10760: against sqrt(KL) the proxy
keeps rising where the gold reward has a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Literal, NamedTuple

from pydantic import Field

from rlhf_core.monitoring.base import MonitorConfig
from rlhf_core.monitoring.history import EVALUATIONS, History, Samples

PROXY, INDEPENDENT = "eval/reward/mean", "eval/independent/mean"


class OverOptimization(MonitorConfig):
    """The proxy rises and the independent reward falls, on the same held-out prompts, over the last evaluations.

    Each prompt has a slope of its own over the evaluations. The mean of the slopes is tested against 0 with the t-test
    of paired samples, so that neither the differences between prompts nor the path of the policy enter. With m
    evaluations in the run, the level of each test is `level` / m (Bonferroni): a run in which the independent reward
    never falls has an alarm with a probability of at most `level`.
    """

    type: Literal["over_optimization"] = "over_optimization"
    window: int = Field(4, ge=3, le=EVALUATIONS)
    """Number of last evaluations over which the slopes are taken."""
    level: float = Field(0.05, gt=0, lt=1)
    """Probability of a false alarm in a whole run."""
    proxy_level: float = Field(0.05, gt=0, lt=1)
    """Level of the test that the proxy rises."""
    for_steps: int = Field(1, ge=1)
    """Number of evaluations in a row for which the condition must hold."""

    def reads(self) -> tuple[str, ...]:
        """Return the means of both rewards over the held-out prompts."""
        return (PROXY, INDEPENDENT)

    @property
    def unit(self) -> str:
        """Return that `for_steps` counts evaluations."""
        return "evaluation"

    def check(self, history: History, *, looks: int) -> str:
        """Return both slopes and the p-value of the fall."""
        proxy, independent = (history.samples(name, self.window) for name in (PROXY, INDEPENDENT))
        if len(independent) < self.window or len(proxy) < self.window:
            return ""
        rise, fall = slope_test(proxy), slope_test(independent)
        if rise.above < self.proxy_level and fall.below < self.level / max(looks, 1):
            steps = f"steps {independent[0][0]} to {independent[-1][0]}"
            return (
                f"held-out proxy {rise.slope:+.3g} a step while the independent reward {fall.slope:+.3g} a step over "
                f"{steps} (p = {fall.below:.1g})"
            )
        return ""


class SlopeTest(NamedTuple):
    """The mean slope per step, and the one-sided p-values of "it is not above 0" and "it is not below 0"."""

    slope: float
    above: float
    below: float


def slope_test(samples: Samples) -> SlopeTest:
    """Return the paired test of the slope over evaluations (step, scores of the same prompts in the same order).

    Prompts with a score that is not finite at one of them are left out; with fewer than 3 others nothing is significant.

    >>> slope_test([(0, (1.0, 2.0, 1.5, 0.5)), (1, (0.5, 1.4, 1.1, 0.1)), (2, (0.0, 1.0, 0.6, -0.6))]).below < 0.001
    True
    """
    steps = [step for step, _ in samples]
    center = fmean(steps)
    weights = [(step - center) for step in steps]
    scale = sum(weight * weight for weight in weights)
    rows = [row for row in zip(*(values for _, values in samples), strict=True) if all(map(math.isfinite, row))]
    slopes = [sum(weight * value for weight, value in zip(weights, row, strict=True)) / scale for row in rows]
    if len(slopes) < 3:
        return SlopeTest(math.nan, 1.0, 1.0)
    above, below = mean_test(slopes)
    return SlopeTest(fmean(slopes), above, below)


def mean_test(values: Sequence[float]) -> tuple[float, float]:
    """Return the one-sided p-values of a t-test that the mean is not above, and not below, 0.

    The t-distribution is turned into the normal one by Wallace's formula (1959), good to 0.2 % at 5 degrees of freedom.
    """
    count, center = len(values), fmean(values)
    variance = sum((value - center) ** 2 for value in values) / (count - 1)
    if variance <= (1e-9 * center) ** 2:  # no spread but rounding: the sign test, for which n equal signs have p = 2^-n
        return (0.5**count if center > 0 else 1.0, 0.5**count if center < 0 else 1.0)
    t, freedom = center / math.sqrt(variance / count), count - 1
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    tail = NormalDist().cdf(-z)
    return (tail, 1 - tail) if t > 0 else (1 - tail, tail)
