"""Monitors that keep a metric in a band: any metric, or the metric of a known fault with its bounds.

Each known fault has a preset or a class with its metric and bounds, so that a profile names it and nothing else:

    [[ppo.monitors]]
    type = "skipped"

The monitor of over-optimization: the training reward rises while the quality that it stands for falls.

Gao, Schulman, Hilton, "Scaling Laws for Reward Model Overoptimization", arXiv 2210.10760: against sqrt(KL) the proxy
keeps rising where the gold reward has a maximum.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.errors import readable
from rlhf_core.schema.base import Config

# ---------------------------------------------------------------- history

Points = list[tuple[int, float]]
Samples = list[tuple[int, tuple[float, ...]]]

FIRST, LAST, EVALUATIONS = 64, 512, 64
"""The numbers of first and last values of a metric that are kept, and of evaluations with the score of each prompt."""


class History:
    """The values of the metrics that monitors read, and the scores of each held-out prompt, by step.

    >>> history = History(["kl/k3"])
    >>> history.add(1, {"kl/k3": 0.5, "reward/mean": 2.0})
    >>> history.last("kl/k3", 2)
    [(1, 0.5)]
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._points: dict[str, Points] = {name: [] for name in names}
        self._samples: defaultdict[str, Samples] = defaultdict(list)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; metrics that no monitor reads, or that the step does not have, are left out."""
        for name, points in self._points.items():
            if name in metrics:
                points.append((step, float(metrics[name])))
                del points[FIRST : max(FIRST, len(points) - LAST)]

    def add_samples(self, step: int, samples: Mapping[str, Sequence[float]]) -> None:
        """Add the scores of the held-out prompts, in the order of the prompts, by the name of their mean."""
        for name, values in samples.items():
            self._samples[name].append((step, tuple(float(value) for value in values)))
            del self._samples[name][:-EVALUATIONS]

    def first(self, name: str, count: int) -> Points:
        """The first `count` values of a metric, or fewer."""
        return self._points[name][: min(count, FIRST)]

    def last(self, name: str, count: int) -> Points:
        """The last `count` values of a metric, or fewer."""
        return self._points[name][-count:]

    def samples(self, name: str, count: int) -> Samples:
        """The scores of each held-out prompt at the last `count` evaluations, or fewer."""
        return self._samples[name][-count:]

    def missing(self) -> list[str]:
        """The metrics that no step had so far."""
        return [name for name, points in self._points.items() if not points]

    def forget_after(self, step: int) -> None:
        """Remove the metrics after `step`, to which the run returns."""
        for points in self._points.values():
            points[:] = [point for point in points if point[0] <= step]
        for samples in self._samples.values():
            samples[:] = [sample for sample in samples if sample[0] <= step]

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint (JSON)."""
        return {"points": self._points, "samples": dict(self._samples)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, points in state["points"].items():
            self._points[name] = [(int(step), float(value)) for step, value in points]
        for name, samples in state["samples"].items():
            self._samples[name] = [(int(step), tuple(values)) for step, values in samples]


# ---------------------------------------------------------------- base

Action = Literal["warn", "pause", "stop", "rollback"]


class MonitorConfig(Config):
    """A monitor: a condition on the history of the metrics, and the action when it holds for several steps."""

    if TYPE_CHECKING:
        type: str

    name: str = Field("", pattern=r"^[\w\-. ]*$")
    """Name of the monitor in messages and metrics; its type if empty."""
    action: Action = "warn"
    """Action: `warn` only logs, `pause` waits until a person decides whether the stage continues, `stop` ends it with
    its best checkpoint without alarms, `rollback` returns to that checkpoint and continues more carefully. All but
    `warn` need `[ppo.evaluate]`, which finds it."""
    for_steps: int = Field(3, ge=1, le=LAST)
    """Number of steps in a row (for `over_optimization`: of evaluations) for which the condition must hold."""
    after: int = Field(0, ge=0)
    """Number of first steps that the monitor ignores."""
    max_rollbacks: int = Field(2, ge=1)
    """Number of rollbacks of this monitor; after them it stops the stage."""
    learning_rate_factor: float = Field(0.5, gt=0, le=1)
    """Factor of the policy's learning rate after each rollback."""
    kl_coef_factor: float = Field(1.0, ge=1)
    """Factor of the KL coefficient after each rollback."""

    @property
    def label(self) -> str:
        """The name that messages and metrics use."""
        return self.name or self.type

    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The names of the metrics that the monitor reads."""

    @abstractmethod
    def check(self, history: History, *, looks: int) -> str:
        """The problem at the last step of the history, "" if all is well.

        `looks` is the number of evaluations of the run, for monitors that test a hypothesis at each of them.
        """

    @property
    def unit(self) -> str:
        """The unit that `for_steps` counts."""
        return "step"


class Windowed(MonitorConfig):
    """A monitor of means over the last steps."""

    window: int = Field(1, ge=1, le=LAST)
    """Number of steps over which the metric is averaged."""


class Relative(Windowed):
    """A monitor that compares with the first steps of the run."""

    reference_steps: int = Field(5, ge=1, le=FIRST)
    """Number of first steps whose mean is the reference."""

    def ratio(self, history: History, name: str) -> float | None:
        """The mean over the window divided by the mean over the first steps; None before the window is past these.

        From a reference below 0 it is 1 plus the change by its size, so that larger values have larger ratios, too.
        None for a reference that is 0 or not finite.
        """
        found = self.means(history, name)
        if found is None:
            return None
        reference, now = found
        if not reference or not math.isfinite(reference):
            return None
        ratio = now / reference
        return ratio if reference > 0 else 2 - ratio  # 1 + (last - reference) / |reference|

    def means(self, history: History, name: str) -> tuple[float, float] | None:
        """The means over the first steps and over the window; None before the window is past the first steps."""
        first, last = history.first(name, self.reference_steps), history.last(name, self.window)
        if len(first) < self.reference_steps or len(last) < self.window or last[0][0] <= first[-1][0]:
            return None
        return mean(first), mean(last)


def mean(points: list[tuple[int, float]]) -> float:
    """The mean of the values of points (step, value)."""
    return sum(value for _, value in points) / len(points)


def crossed_bound(value: float, low: float | None, high: float | None) -> str:
    """Describe how `value` leaves [low, high], "" if it does not. A value that is not a number is outside.

    >>> crossed_bound(3.14159, 6.0, None), crossed_bound(7.0, 6.0, None)
    ('3.14 < 6', '')
    """
    if low is not None and not value >= low:
        return f"{readable(value, 3)} < {low:g}"
    if high is not None and not value <= high:
        return f"{readable(value, 3)} > {high:g}"
    return "" if value == value else "is not a number"


# ---------------------------------------------------------------- bands


class Bounded(Windowed):
    """One metric with a lower bound, an upper one, or both."""

    metric: str
    """Metric of a step, without the name of the stage: `kl/k3`, `rollout/length`."""
    low: float | None = None
    """Lower bound of the mean over the window."""
    high: float | None = None
    """Upper bound of the mean over the window."""

    def reads(self) -> tuple[str, ...]:
        """The metric."""
        return (self.metric,)

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if metric.startswith("time/"):
            raise ValueError(
                "differs from run to run, and a resumed run must end as a whole one; choose another metric"
            )
        return metric

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low is None and self.high is None:
            raise ValueError(f"low, high = None: {self.type} needs at least one bound; give one")
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low = {self.low}: must be < high = {self.high}; lower it")
        return self


PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Groups whose answers all have the same reward carry no gradient.
    "zero_variance": {"metric": "rollout/zero_variance", "high": 0.9},
    # Rollouts without a reward are left out with their group.
    "invalid": {"metric": "rollout/valid", "low": 0.9},
    # Updates are skipped if the loss or the gradient is not finite.
    "skipped": {"metric": "policy/skipped", "high": 0.25},
    # A value model that explains less than nothing adds noise to every advantage; at its first steps it does.
    "explained_variance": {"metric": "value/explained_variance", "low": -0.5, "window": 3},
    # A policy that is trained on answers without their end token unlearns to stop.
    "end_token": {"metric": "rollout/ended", "low": 0.9},
}
"""Type of a band around the metric of a known fault -> its defaults."""


class Band(Bounded):
    """A band around any metric, or around the metric of a known fault."""

    type: Literal["band", "zero_variance", "invalid", "skipped", "explained_variance", "end_token"] = "band"
    """`band`, or a known fault, whose metric, bounds and window are the defaults."""

    @model_validator(mode="before")
    @classmethod
    def _use_preset(cls, given: Any) -> Any:
        return {**PRESETS.get(given.get("type", "band"), {}), **given} if isinstance(given, dict) else given

    def check(self, history: History, *, looks: int) -> str:
        """Describe how the mean over the window leaves the band; "" before the window is full."""
        last = history.last(self.metric, self.window)
        found = crossed_bound(mean(last), self.low, self.high) if len(last) == self.window else ""
        return f"{self.metric} {found}" if found else ""


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
        """Describe how the ratio leaves the band."""
        ratio = self.ratio(history, self.metric)
        found = crossed_bound(ratio, self.low, self.high) if ratio is not None else ""
        return f"{self.metric}: ratio to the first {self.reference_steps} steps {found}" if found else ""


class Collapse(Relative):
    """Answers collapse: they are short *and* alike, compared with the first steps. A policy that found a hack answers with one word."""

    type: Literal["collapse"] = "collapse"
    length: float = Field(0.5, gt=0, lt=1)
    """Bound of the mean length, as a share of the mean length over the first steps."""
    diversity: float = Field(0.5, gt=0, lt=1)
    """Bound of the share of unique answers, and of distinct pairs of tokens, relative to the first steps; one of both
    must be below it."""
    window: int = Field(3, ge=1, le=512)

    def reads(self) -> tuple[str, ...]:
        """Length and diversity."""
        return ("rollout/length", "rollout/unique", "rollout/distinct_2")

    def check(self, history: History, *, looks: int) -> str:
        """Describe length and diversity if both fell below their bounds."""
        ratios = [self.ratio(history, name) for name in self.reads()]
        length, unique, distinct = (1.0 if ratio is None else ratio for ratio in ratios)
        if length < self.length and min(unique, distinct) < self.diversity:
            return (
                f"length x{length:.2f}, unique answers x{unique:.2f}, distinct pairs x{distinct:.2f} of the first steps"
            )
        return ""


# ---------------------------------------------------------------- over optimization

PROXY, INDEPENDENT = "eval/reward/mean", "eval/independent/mean"


class OverOptimization(MonitorConfig):
    """The proxy rises and the independent reward falls, on the same held-out prompts, over the last evaluations.

    Each prompt has a separate slope over the evaluations. The mean of the slopes is tested against 0 with the t-test of
    paired samples, so that neither the differences between prompts nor the path of the policy enter. With m evaluations
    in the run, the level of each test is `level` / m (Bonferroni): a run in which the independent reward never falls
    has an alarm with a probability of at most `level`.
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
        """The means of both rewards over the held-out prompts."""
        return (PROXY, INDEPENDENT)

    @property
    def unit(self) -> str:
        """`evaluation`, because `for_steps` counts evaluations."""
        return "evaluation"

    def check(self, history: History, *, looks: int) -> str:
        """Describe both slopes and the p-value of the fall."""
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
    """Test the slope over evaluations (step, scores of the same prompts in the same order), paired by prompt.

    Prompts with a score that is not finite at some evaluation are left out; with fewer than 3 others nothing is
    significant.

    >>> slope_test([(0, (1.0, 2.0, 1.5, 0.5)), (1, (0.5, 1.4, 1.1, 0.1)), (2, (0.0, 1.0, 0.6, -0.6))]).below < 0.001
    True
    """
    steps = [step for step, _ in samples]
    center = fmean(steps)  # t bar
    weights = [(step - center) for step in steps]  # t - t bar; slope = sum w y / sum w^2
    scale = sum(weight * weight for weight in weights)  # sum (t - t bar)^2
    rows = [row for row in zip(*(values for _, values in samples), strict=True) if all(map(math.isfinite, row))]
    slopes = [sum(weight * value for weight, value in zip(weights, row, strict=True)) / scale for row in rows]
    if len(slopes) < 3:
        return SlopeTest(math.nan, 1.0, 1.0)
    above, below = mean_test(slopes)
    return SlopeTest(fmean(slopes), above, below)


def mean_test(values: Sequence[float]) -> tuple[float, float]:
    """The one-sided p-values of a t-test that the mean is not above, and not below, 0.

    The t-distribution is turned into the normal one by Wallace's formula (1959), good to 0.2 % at 5 degrees of freedom.
    """
    count, center = len(values), fmean(values)
    variance = sum((value - center) ** 2 for value in values) / (count - 1)  # s^2, unbiased
    if variance <= (1e-9 * center) ** 2:  # no spread but rounding: the sign test, for which n equal signs have p = 2^-n
        return (0.5**count if center > 0 else 1.0, 0.5**count if center < 0 else 1.0)
    t, freedom = center / math.sqrt(variance / count), count - 1  # t = mean / (s / sqrt n)
    z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
    tail = NormalDist().cdf(-z)
    return (tail, 1 - tail) if t > 0 else (1 - tail, tail)
