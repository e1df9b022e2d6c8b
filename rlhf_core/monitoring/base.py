"""What all monitors have in common: a name, an action, and how long a fault must last."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlhf_core.monitoring.history import FIRST, LAST, History
from rlhf_core.schema.base import Config

Action = Literal["warn", "pause", "stop", "rollback"]


class MonitorConfig(Config):
    """A monitor: a condition on the history of the metrics, and the action when it holds for several steps."""

    if TYPE_CHECKING:
        type: str

    name: str = Field("", pattern=r"^[\w\-. ]*$")
    """Name of the monitor in messages and metrics; its type if empty."""
    action: Action = "warn"
    """What happens: `warn` only says so, `pause` waits until a person decides whether the stage goes on, `stop` ends it with
    its best honest checkpoint, `rollback` returns to that checkpoint and goes on more carefully. All but `warn` need
    `[ppo.evaluate]`, which finds it."""
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
        """Return the name that messages and metrics use."""
        return self.name or self.type

    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Return the names of the metrics that the monitor reads."""
        raise NotImplementedError

    @abstractmethod
    def check(self, history: History, *, looks: int) -> str:
        """Return what is wrong at the last step of the history, "" if nothing is.

        `looks` is the number of evaluations of the run, for monitors that test a hypothesis at each of them.
        """
        raise NotImplementedError

    @property
    def unit(self) -> str:
        """Return what `for_steps` counts."""
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
        """Return the mean over the window by that over the first steps; None before the window is past these.

        From a reference below 0 it is 1 plus the change by its size, so that larger values have larger ratios, too. None
        for a reference that is 0 or not finite.
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
        """Return the means over the first steps and over the window; None before the window is past these."""
        first, last = history.first(name, self.reference_steps), history.last(name, self.window)
        if len(first) < self.reference_steps or len(last) < self.window or last[0][0] <= first[-1][0]:
            return None
        return mean(first), mean(last)


def mean(points: list[tuple[int, float]]) -> float:
    """Return the mean of the values of points (step, value)."""
    return sum(value for _, value in points) / len(points)


def outside(value: float, low: float | None, high: float | None) -> str:
    """Return how `value` leaves [low, high], "" if it does not. A value that is not a number is outside.

    >>> outside(3.14159, 6.0, None), outside(7.0, 6.0, None)
    ('3.14 < 6', '')
    """
    if low is not None and not value >= low:
        return f"{value:.3g} < {low:g}"
    if high is not None and not value <= high:
        return f"{value:.3g} > {high:g}"
    return "" if value == value else "is not a number"
