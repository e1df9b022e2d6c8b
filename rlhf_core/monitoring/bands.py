"""Monitors that hold a metric in a band: of any metric, and with the metric and the bounds of a known fault.

Each known fault is a class whose defaults are its metric and bounds, so that a profile names it and nothing else:

    [[ppo.monitors]]
    type = "skipped"
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.monitoring.base import Relative, Windowed, mean, outside
from rlhf_core.monitoring.history import History


class Bounded(Windowed):
    """One metric with a lower bound, an upper one, or both."""

    metric: str
    """Metric of a step, without the name of the stage: `kl/k3`, `rollout/length`."""
    low: float | None = None
    """Lower bound of the mean over the window."""
    high: float | None = None
    """Upper bound of the mean over the window."""

    def reads(self) -> tuple[str, ...]:
        """Return the metric."""
        return (self.metric,)

    @field_validator("metric")
    @classmethod
    def _is_the_same_in_every_run(cls, metric: str) -> str:
        if metric.startswith("time/"):
            raise ValueError(
                "differs from run to run, and a resumed run must end as a whole one; choose another metric"
            )
        return metric

    @model_validator(mode="after")
    def _has_bounds(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError(f"low, high = None: {self.type} needs at least one bound; give one")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low}: must be < high = {self.high}; lower it")
        return self


class Banded(Bounded):
    """A band around one metric."""

    def check(self, history: History, *, looks: int) -> str:
        """Return how the mean over the window leaves the band; nothing before the window is full."""
        last = history.last(self.metric, self.window)
        found = outside(mean(last), self.low, self.high) if len(last) == self.window else ""
        return f"{self.metric} {found}" if found else ""


class Band(Banded):
    """A band around any metric."""

    type: Literal["band"] = "band"


class ZeroVariance(Banded):
    """Groups whose answers all earn the same carry no gradient."""

    type: Literal["zero_variance"] = "zero_variance"
    metric: str = "rollout/zero_variance"
    high: float | None = 0.9


class Invalid(Banded):
    """Rollouts without a reward are left out with their group."""

    type: Literal["invalid"] = "invalid"
    metric: str = "rollout/valid"
    low: float | None = 0.9


class Skipped(Banded):
    """Updates are skipped if the loss or the gradient is not finite."""

    type: Literal["skipped"] = "skipped"
    metric: str = "policy/skipped"
    high: float | None = 0.25


class ExplainedVariance(Banded):
    """A value model that explains less than nothing adds noise to every advantage."""

    type: Literal["explained_variance"] = "explained_variance"
    metric: str = "value/explained_variance"
    low: float | None = -0.5
    window: int = Field(3, ge=1, le=512)


class EndToken(Banded):
    """Answers that ended by themselves without their end token: the policy would unlearn to stop."""

    type: Literal["end_token"] = "end_token"
    metric: str = "rollout/ended"
    low: float | None = 0.9


class Drift(Bounded, Relative):
    """A metric that leaves a band around its own mean over the first steps."""

    type: Literal["drift"] = "drift"
    metric: str
    """Metric of a step, without the name of the stage, that is not near 0."""
    low: float | None = None
    """Lower bound of the mean over the window, as a share of the mean over the first steps."""
    high: float | None = None
    """Upper bound of the mean over the window, as a multiple of the mean over the first steps."""

    def check(self, history: History, *, looks: int) -> str:
        """Return how the ratio leaves the band."""
        ratio = self.ratio(history, self.metric)
        found = outside(ratio, self.low, self.high) if ratio is not None else ""
        return f"{self.metric}: ratio to the first {self.reference_steps} steps {found}" if found else ""


class Collapse(Relative):
    """Answers collapse: they are short *and* alike, compared with the first steps. A policy that found a hack answers with one word."""

    type: Literal["collapse"] = "collapse"
    length: float = Field(0.5, gt=0, lt=1)
    """Bound of the mean length, as a share of that over the first steps."""
    diversity: float = Field(0.5, gt=0, lt=1)
    """Bound of the share of unique answers, and of distinct pairs of tokens, as a share of that over the first steps; one
    of both must be below it."""
    window: int = Field(3, ge=1, le=512)

    def reads(self) -> tuple[str, ...]:
        """Return length and diversity."""
        return ("rollout/length", "rollout/unique", "rollout/distinct_2")

    def check(self, history: History, *, looks: int) -> str:
        """Return length and diversity if both fell below their bounds."""
        ratios = [self.ratio(history, name) for name in self.reads()]
        length, unique, distinct = (1.0 if ratio is None else ratio for ratio in ratios)
        if length < self.length and min(unique, distinct) < self.diversity:
            return (
                f"length x{length:.2f}, unique answers x{unique:.2f}, distinct pairs x{distinct:.2f} of the first steps"
            )
        return ""
