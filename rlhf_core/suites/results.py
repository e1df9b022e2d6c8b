"""Keep the result of a suite: a row per prompt with its measures, and the mean of each measure with its interval.

The unit of every interval is the prompt: several answers to one prompt are averaged before. A measure of a row may have a
weight, so that a mean over instructions, not prompts, is sum_i w_i v_i / sum_i w_i; the bootstrap resamples the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import DataError, explain
from rlhf_core.evaluation.bootstrap import Interval, resampled_indices
from rlhf_core.stage.context import StageContext

LEVEL = 0.95
RESAMPLES = 2000
NO_WEIGHTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt with the first answer to it and its measures; `weights` are those that are not 1.

    >>> Row("p1", "math", "1+1?", "2", {"pass_at_1": 1.0}).values["pass_at_1"]
    1.0
    """

    id: str
    slice: str
    prompt: str
    answer: str
    values: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)

    def weight(self, measure: str) -> float:
        """Return the weight of a measure in its mean."""
        return self.weights[measure] if measure in self.weights else 1.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a suite found of one policy. `measures` holds those that are no mean over the rows.

    `headline` names the measure that stands for the suite. A measure in `lower_is_better` is a rate of failures.
    """

    rows: tuple[Row, ...]
    headline: str
    lower_is_better: tuple[str, ...] = ()
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


def report_of(result: Measured, *, kind: str, policy: str, seed: int) -> dict[str, Any]:
    """Return the content of the suite's report.json: every measure with its interval, in all and by slice."""
    slices: dict[str, list[Row]] = {}
    for row in result.rows:
        slices.setdefault(row.slice, []).append(row)
    return {
        "type": kind,
        "policy": policy,
        "headline": result.headline,
        "lower_is_better": list(result.lower_is_better),
        "level": LEVEL,
        "measures": {**means(result.rows, seed=seed), **result.measures},
        "slices": {name: means(rows, seed=seed) for name, rows in slices.items()},
        "facts": dict(result.facts),
    }


def means(rows: Sequence[Row], *, seed: int) -> dict[str, dict[str, float]]:
    """Return measure -> {mean, low, high, prompts} over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    found = {}
    for name in names:
        having = [row for row in rows if name in row.values]
        interval = weighted_interval(*_columns(having, name), seed=seed)
        found[name] = interval._asdict() | {"prompts": float(len(having))}
    return found


def difference(ours: Sequence[Row], theirs: Sequence[Row], measure: str, *, seed: int) -> dict[str, float] | None:
    """Return the difference of a measure's means over the shared prompts, by the paired bootstrap; None without any.

    Both policies are resampled at the same prompts, so what makes a prompt hard for both cancels out.
    """
    others = {row.id: row for row in theirs if measure in row.values}
    shared = [row for row in ours if measure in row.values and row.id in others]
    if not shared:
        return None
    mine, weights = _columns(shared, measure)
    other, other_weights = _columns([others[row.id] for row in shared], measure)
    means_of = [
        _resampled(values, weighted, seed=seed) for values, weighted in ((mine, weights), (other, other_weights))
    ]
    low, high = _ends(means_of[0] - means_of[1])
    centre = float(np.average(mine, weights=weights) - np.average(other, weights=other_weights))
    return {"mean": centre, "low": low, "high": high, "prompts": float(len(shared))}


def weighted_interval(values: NDArray[np.float64], weights: NDArray[np.float64], *, seed: int) -> Interval:
    """Return the weighted mean of `values` with its percentile bootstrap interval.

    >>> weighted_interval(np.array([1.0, 1.0]), np.array([2.0, 3.0]), seed=1)
    Interval(mean=1.0, low=1.0, high=1.0)
    """
    low, high = _ends(_resampled(values, weights, seed=seed))
    return Interval(float(np.average(values, weights=weights)), low, high)


def _resampled(values: NDArray[np.float64], weights: NDArray[np.float64], *, seed: int) -> NDArray[np.float64]:
    products = values * weights
    pieces = resampled_indices(len(values), resamples=RESAMPLES, seed=seed)
    return np.concatenate([products[index].sum(axis=1) / weights[index].sum(axis=1) for index in pieces])


def _ends(means_of: NDArray[np.float64]) -> tuple[float, float]:
    low, high = (float(np.quantile(means_of, (1 + side * LEVEL) / 2)) for side in (-1, 1))
    return low, high


def _columns(rows: Sequence[Row], measure: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    values = np.array([row.values[measure] for row in rows], dtype=np.float64)
    return values, np.array([row.weight(measure) for row in rows], dtype=np.float64)


# ---------------------------------------------------------------- files

REPORT, ROWS = "report.json", "rows.jsonl"
SHOWN = 16


def record(result: Measured, *, kind: str, policy: str, context: StageContext) -> dict[str, float]:
    """Write report.json and rows.jsonl, show them in the tracker, and return the stage's metrics."""
    report = report_of(result, kind=kind, policy=policy, seed=context.seed)
    (context.out / REPORT).write_text(json.dumps(report, indent=2, allow_nan=False))
    write_rows(context.out / ROWS, result.rows)
    context.tracker.file(context.out / REPORT, "")
    names = list(dict.fromkeys(name for row in result.rows for name in row.values))
    shown = [
        [row.slice, row.prompt, row.answer, *(row.values[name] if name in row.values else "" for name in names)]
        for row in result.rows[:SHOWN]
    ]
    context.tracker.table("samples", ["slice", "prompt", "answer", *names], shown)
    metrics = {"prompts": float(len(result.rows))}
    for name, found in report["measures"].items():
        metrics |= {name: found["mean"]} | {f"{name}_{end}": found[end] for end in ("low", "high") if end in found}
    context.metrics(0, metrics)
    return metrics


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows, one JSON object per line."""
    path.write_text("".join(f"{json.dumps(asdict(row), ensure_ascii=False)}\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a suite."""
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line]


def check_rows(rows: Sequence[Row], *, rule: str, remedy: str) -> None:
    """Raise DataError with `rule` if no row is left, or if two have the same ID."""
    if not rows:
        raise DataError(explain("evaluate.suites", 0, rule, remedy))
    if len({row.id for row in rows}) < len(rows):
        raise DataError(explain("evaluate.suites", len(rows), "two rows have the same ID", "remove repeated prompts"))
