"""Keep the result of a suite: a row per prompt with its measures, and the mean of each measure with its interval.

The unit of every interval is the prompt: several answers to one prompt are averaged before. A measure of a row may have a
weight, so that a mean over instructions, not prompts, is sum_i w_i v_i / sum_i w_i.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_core.errors import DataError, explain
from rlhf_core.evaluation.intervals import DIFFERENCE_OF_SHARES, LEVEL, SHARE, bounds_of, mean_interval
from rlhf_core.stage.context import StageContext

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

    `headline` names the measure that stands for the suite. A measure in `lower_is_better` is a rate of failures, and one in
    `shares` is between 0 and 1.
    """

    rows: tuple[Row, ...]
    headline: str
    lower_is_better: tuple[str, ...] = ()
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    shares: tuple[str, ...] = ()


def report_of(result: Measured, *, kind: str, policy: str) -> dict[str, Any]:
    """Return the content of the suite's report.json: every measure with its interval, in all and by slice."""
    slices: dict[str, list[Row]] = {}
    for row in result.rows:
        slices.setdefault(row.slice, []).append(row)
    return {
        "type": kind,
        "policy": policy,
        "headline": result.headline,
        "lower_is_better": list(result.lower_is_better),
        "shares": list(result.shares),
        "level": LEVEL,
        "measures": {**means(result.rows, shares=result.shares), **result.measures},
        "slices": {name: means(rows, shares=result.shares) for name, rows in slices.items()},
        "facts": dict(result.facts),
    }


def means(rows: Sequence[Row], *, shares: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return measure -> {mean, low, high, prompts} over the rows that have it; `shares` are those between 0 and 1."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    found = {}
    for name in names:
        having = [row for row in rows if name in row.values]
        values, weights = _columns(having, name)
        bounds = SHARE if name in shares else None
        found[name] = mean_interval(values, weights=weights, bounds=bounds).plain()
    return found


def difference(ours: Sequence[Row], theirs: Sequence[Row], measure: str, *, share: bool) -> dict[str, float] | None:
    """Return the mean difference of a measure over the shared prompts, with its interval; None without any.

    Prompt by prompt, so what makes a prompt hard for both policies cancels out. A prompt has the same weight for both.
    """
    others = {row.id: row for row in theirs if measure in row.values}
    shared = [row for row in ours if measure in row.values and row.id in others]
    if not shared:
        return None
    apart = [row.values[measure] - others[row.id].values[measure] for row in shared]
    bounds = DIFFERENCE_OF_SHARES if share else None
    return mean_interval(apart, weights=_columns(shared, measure)[1], bounds=bounds).plain()


def shares_among(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the measures of which every row has 0 or 1, as a function that says right or wrong gives."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    return tuple(name for name in names if bounds_of([row.values[name] for row in rows if name in row.values]))


def _columns(rows: Sequence[Row], measure: str) -> tuple[list[float], list[float]]:
    return [row.values[measure] for row in rows], [row.weight(measure) for row in rows]


# ---------------------------------------------------------------- files

REPORT, ROWS = "report.json", "rows.jsonl"
ENDS = ("low", "high", "prompts")
"""What the metrics of a mean have besides it, as `<measure>_low`."""
SHOWN = 16


def record(result: Measured, *, kind: str, policy: str, context: StageContext) -> dict[str, float]:
    """Write report.json and rows.jsonl, show them in the tracker, and return the stage's metrics."""
    report = report_of(result, kind=kind, policy=policy)
    (context.out / REPORT).write_text(json.dumps(report, indent=2, allow_nan=False), encoding="utf-8")
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
        metrics |= {name: found["mean"]} | {f"{name}_{end}": found[end] for end in ENDS if end in found}
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
