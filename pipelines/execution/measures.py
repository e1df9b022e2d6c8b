"""Read the headline numbers of finished stages, with their intervals: for sweeps, comparisons and the tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef

REPORT = "report.json"
OF_POLICIES = ("gold", "reward_model", "win_rate", "kl", "tokens")
"""Measures of a policy in the report of `evaluate`, the most informative first."""
LOW, HIGH, PROMPTS = "_low", "_high", "_prompts"
"""Ends of the names of metrics that are the interval of another one, and the number of prompts that it is of."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number with its interval; without one, `low` and `high` are the number.

    >>> str(Measure(0.5, 0.4, 0.6)), str(Measure(3.0, 3.0, 3.0))
    ('0.5 [0.4, 0.6]', '3')
    """

    mean: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        return self.low < self.high

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.mean)

    def __str__(self) -> str:
        if not self.is_finite:
            return "not finite"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]" if self.has_interval else f"{self.mean:.3g}"


def stage_measures(store: ArtifactStore, ref: ArtifactRef, metrics: Mapping[str, float]) -> dict[str, Measure]:
    """Return the measures of a finished stage: of each policy, if it compares policies, and the metrics of its record."""
    return of_metrics(metrics) | of_report(read_report(store.path(ref)))


def of_metrics(metrics: Mapping[str, float]) -> dict[str, Measure]:
    """Return the metrics of a record, those called `<name>_low` and `<name>_high` as the interval of `<name>`.

    >>> of_metrics({"accuracy": 0.7, "accuracy_low": 0.6, "accuracy_high": 0.8})
    {'accuracy': Measure(mean=0.7, low=0.6, high=0.8)}
    """
    bounds = {name + end for name in metrics for end in (LOW, HIGH, PROMPTS)}
    return {
        name: Measure(value, metrics.get(name + LOW, value), metrics.get(name + HIGH, value))
        for name, value in metrics.items()
        if name not in bounds
    }


def of_report(report: Mapping[str, Any]) -> dict[str, Measure]:
    """Return `<policy>/<measure>` of every policy in the report of `evaluate`; nothing for other reports."""
    rows = report.get("policies")
    if not isinstance(rows, Mapping):
        return {}
    return {
        f"{policy}/{name}": _measure(row[name]) for policy, row in rows.items() for name in OF_POLICIES if name in row
    }


def _measure(value: Mapping[str, float]) -> Measure:
    low, high = (value["low"], value["high"]) if "low" in value else (value["mean"], value["mean"])
    return Measure(value["mean"], low, high)


def read_report(folder: Path) -> dict[str, Any]:
    """Return the content of the report in an artifact's folder; {} if there is none."""
    path = folder / REPORT
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return report
