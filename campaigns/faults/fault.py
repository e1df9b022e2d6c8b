"""Define the entries of the table of faults: a fault that is really caused, and its observed outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """What came of a fault. Times are seconds of the wall clock; None where there was nothing to wait for.

    `recovered`: the run went on by itself and ended with the right result. `one error`: it ended with one error that names
    stage, worker or sample, and remedy, and the same command then resumed. `left out`: the run went on without the samples
    that it struck; they are invalid rollouts with their reason, counted, left out with their group and never scored 0.
    `not handled`: anything else. `skipped`: it could not be caused here; `said` says why.
    """

    result: Literal["recovered", "one error", "left out", "not handled", "skipped"]
    detect_s: float | None
    """From the fault until the program noticed."""
    recover_s: float | None
    """From noticing until the work went on (recovered) or until the process had ended (one error)."""
    said: str
    """The line that a person reads."""


@dataclass(frozen=True)
class Fault:
    """A fault by name. `deadline_s` is the stated limit for noticing it; `inject` causes it in an empty folder."""

    name: str
    deadline_s: float
    inject: Callable[[Path], Outcome]
