"""Monitors of pairs of figures that must agree: the probabilities of sampler and trainer, k1 and k3."""

import math
from typing import Literal

from pydantic import Field

from rlhf_core.monitoring.bands import LAST, History, MonitorConfig, Points, Relative, crossed_bound, mean_test


class LogprobMismatch(Relative):
    """The sampler's probabilities are not the trainer's: stale weights, another temperature, another template.

    q = pi_old / mu of each sampled token. Besides fixed bounds, growth has a bound: engines differ by rounding from the
    first step on, and by the same amount, while weights that are no longer sent are further away at every step.
    """

    type: Literal["mismatch"] = "mismatch"
    exp_abs_log_q: float | None = Field(1.1, gt=1)
    """Upper bound of the mean of exp |log q|."""
    ess: float | None = Field(0.9, gt=0, le=1)
    """Lower bound of the effective share of the samples, (sum q)^2 / (N sum q^2)."""
    log_q_max: float | None = Field(None, gt=0)
    """Upper bound of the largest |log q| of a token."""
    growth: float | None = Field(4.0, gt=1)
    """Upper bound of the mean of exp |log q| - 1, as a multiple of its mean over the first steps."""
    floor: float = Field(0.004, ge=0)
    """Value of exp |log q| - 1 up to which no growth counts."""

    def reads(self) -> tuple[str, ...]:
        """The metrics that have a bound."""
        names = [name for name, low, high in self._bounds() if (low, high) != (None, None)]
        return tuple(dict.fromkeys([*names, *([_EXP] if self.growth is not None else [])]))

    def check(self, history: History, *, looks: int) -> str:
        """The first figure that leaves its bound."""
        for name, low, high in self._bounds():
            last = history.last(name, 1) if (low, high) != (None, None) else []
            found = crossed_bound(last[-1][1], low, high) if last else ""
            if found:
                return f"{name} {found}"
        return self._growth(history) if self.growth is not None else ""

    def _growth(self, history: History) -> str:
        assert self.growth is not None
        found = self.means(history, _EXP)
        if found is None:
            return ""
        before, now = (value - 1 for value in found)
        if now <= max(self.floor, self.growth * before):  # not for a value that is not a number
            return ""
        return f"{_EXP} - 1 grew from {before:.2g} over the first {self.reference_steps} steps to {now:.2g}"

    def _bounds(self) -> tuple[tuple[str, float | None, float | None], ...]:
        return (
            (_EXP, None, self.exp_abs_log_q),
            ("mismatch/ess", self.ess, None),
            ("mismatch/log_q_max", None, self.log_q_max),
        )


_EXP = "mismatch/exp_abs_log_q"


class KLEstimate(MonitorConfig):
    """The means of k1 and k3 estimate the same divergence; one of them is wrong if they disagree.

    They disagree if they are far apart at one step; if they differ by more than chance over the last steps, where the
    differences are divided by sqrt(k3), to which the spread of k1 is proportional near the reference, and their mean is
    tested against 0 (t-test); or if they are the same number at each of these steps, as only a copy is. Schulman,
    "Approximating KL Divergence" (2020).
    """

    type: Literal["kl_estimate"] = "kl_estimate"
    tolerance: float = Field(0.05, gt=0)
    """Bound of the difference of both, in nats per token, in addition to the bound from `relative`."""
    relative: float = Field(0.5, ge=0)
    """Share of k3 by which they may differ besides."""
    window: int = Field(10, ge=4, le=LAST)
    """Number of last steps for which the differences are tested."""
    level: float = Field(1e-3, ge=0, lt=1)
    """Probability that one test has a false alarm; 0 tests nothing."""

    def reads(self) -> tuple[str, ...]:
        """Both estimates."""
        return ("kl/per_token", "kl/k3")

    def check(self, history: History, *, looks: int) -> str:
        """The difference of the estimates, if it is too large."""
        k1, k3 = (history.last(name, self.window) for name in self.reads())
        if not k1 or not k3:
            return ""
        allowed = self.tolerance + self.relative * abs(k3[-1][1])  # |k1 - k3| <= tolerance + relative * k3
        found = crossed_bound(abs(k1[-1][1] - k3[-1][1]), None, allowed)
        if found:
            return f"k1 {k1[-1][1]:.3g} against k3 {k3[-1][1]:.3g}: difference {found}"
        return self._tested(k1, k3)

    def _tested(self, k1: Points, k3: Points) -> str:
        """Test the agreement over all steps; steps whose policy is still the reference are ignored."""
        pairs = [(one, three) for (_, one), (_, three) in zip(k1, k3, strict=False) if three > 1e-12]
        if len(pairs) < self.window or not self.level:
            return ""
        if all(one == three for one, three in pairs):
            return f"k1 and k3 are the same number at {self.window} steps in a row"
        above, below = mean_test([(one - three) / math.sqrt(three) for one, three in pairs])
        chance = 2 * min(above, below)  # two-sided
        if chance >= self.level:
            return ""
        one, three = (sum(values) / self.window for values in zip(*pairs, strict=True))
        return f"k1 {one:.3g} against k3 {three:.3g} over {self.window} steps: p = {chance:.1g}"
