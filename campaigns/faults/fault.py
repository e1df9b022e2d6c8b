"""Define the entries of the table of faults: a real fault, and its observed outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault. Times are wall-clock seconds; None if nothing had to be awaited.

    `recovered`: the run continued by itself and ended with the correct result. `one error`: it ended with one error
    that names stage, worker or sample, and remedy, and the same command then resumed. `left out`: the run continued
    without the affected samples; they are invalid rollouts with their reason, counted, excluded with their group and
    never scored 0. `not handled`: anything else. `skipped`: it could not be caused here; `said` has the reason.
    """

    result: Literal["recovered", "one error", "left out", "not handled", "skipped"]
    detect_s: float | None
    """From the fault until the program detected it."""
    recover_s: float | None
    """From detection until the work continued (recovered) or the process had ended (one error)."""
    said: str
    """The line that a person reads."""


@dataclass(frozen=True)
class Fault:
    """A named fault. `deadline_s` is the stated limit for detecting it; `inject` causes it in an empty folder."""

    name: str
    deadline_s: float
    inject: Callable[[Path], Outcome]
