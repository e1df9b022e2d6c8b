"""Read the results of EleutherAI's evaluation harness as those of a suite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.evaluation.intervals import LEVEL, t_quantile
from rlhf_core.suites.results import Measured, Row, shares_among

NO_FILTER = "none"
TOLERANCE = 1e-9
Results = Mapping[str, Any]


def measured(results: Results, *, headline: str) -> Measured:
    """Return the harness's numbers as `<task>/<metric>` (`<task>/<metric>/<filter>` where there are filters).

    A metric that is the mean over documents gets our interval over them, and any other that of the harness's standard
    error, if it has one above 0. Raises ConfigError for a `headline` that is none of the measures.
    """
    rows: dict[str, Row] = {}
    for task, samples in results["samples"].items():
        for sample in samples:
            one = _row(task, sample)
            rows[one.id] = Row(one.id, task, one.prompt, one.answer, {**_values(rows, one.id), **one.values})
    found = _numbers(results)
    _check_numbers(found, rows.values())
    kept = {name for name, (value, _) in found.items() if _is_mean(rows.values(), name, value)}
    if not found:
        raise DataError(
            explain("evaluate.suites.tasks", list(results["results"]), "have no metric", "name other tasks")
        )
    if headline and headline not in found:
        rule = f"is no measure of these tasks ({', '.join(found)})"
        raise ConfigError(explain("evaluate.suites.headline", headline, rule, "name one of these"))
    counts = Counter(row.slice for row in rows.values())
    others = {
        name: _interval(*number, documents=counts[name.partition("/")[0]])
        for name, number in found.items()
        if name not in kept
    }
    chosen = tuple(
        Row(
            row.id,
            row.slice,
            row.prompt,
            row.answer,
            {name: value for name, value in row.values.items() if name in kept},
        )
        for row in rows.values()
    )
    shares = shares_among(chosen)
    return Measured(chosen, headline or next(iter(found)), _lower_is_better(results), others, shares=shares)


def _numbers(results: Results) -> dict[str, tuple[float, float]]:
    """Return measure -> (value, standard error or NaN), in the order of the harness."""
    found = {}
    for task, numbers in results["results"].items():
        for key, value in numbers.items():
            metric, _, filtered = key.partition(",")
            if filtered and not metric.endswith("_stderr") and isinstance(value, (int, float, np.number)):
                error = numbers[f"{metric}_stderr,{filtered}"] if f"{metric}_stderr,{filtered}" in numbers else None
                found[measure_name(task, metric, filtered)] = (
                    float(value),
                    float(error) if isinstance(error, (int, float, np.number)) else math.nan,
                )
    return found


def _check_numbers(found: Mapping[str, tuple[float, float]], rows: Iterable[Row]) -> None:
    """Raise DataError for a measure that is no finite number, in all or at one document."""
    for name, value in [
        *((name, value) for name, (value, _) in found.items()),
        *(one for row in rows for one in row.values.items()),
    ]:
        if not math.isfinite(value):
            rule, remedy = "is no finite number", "leave out this task or metric; the harness's own numbers are kept"
            raise DataError(explain(f"evaluate.suites.{name}", value, rule, remedy))


def _lower_is_better(results: Results) -> tuple[str, ...]:
    better = results["higher_is_better"]
    names = []
    for task, numbers in results["results"].items():
        for key in numbers:
            metric, _, filtered = key.partition(",")
            if filtered and task in better and metric in better[task] and better[task][metric] is False:
                names.append(measure_name(task, metric, filtered))
    return tuple(names)


def measure_name(task: str, metric: str, filtered: str) -> str:
    """Return the name of a metric of a task in our reports."""
    return f"{task}/{metric}" if filtered == NO_FILTER else f"{task}/{metric}/{filtered}"


def _interval(value: float, error: float, *, documents: int) -> dict[str, float]:
    """Return a measure with the interval of its standard error. No error, or one of 0 (all agree), gives none.

    A group of tasks has no documents of its own: the normal distribution is taken for it.
    """
    counted = {"mean": value} | ({"prompts": float(documents)} if documents else {})
    if math.isnan(error) or error <= 0 or documents == 1:
        return counted
    half = t_quantile(LEVEL, documents - 1 if documents else math.inf) * error
    return counted | {"low": value - half, "high": value + half}


def _row(task: str, sample: Mapping[str, Any]) -> Row:
    """Return the row of a document; metrics that are no number per document are left out."""
    filtered = sample["filter"]
    values = {
        measure_name(task, metric, filtered): float(sample[metric])
        for metric in sample["metrics"]
        if isinstance(sample[metric], (bool, int, float, np.number))
    }
    identity = f"{task}:{sample['doc_id']}:{str(sample['doc_hash'])[:8]}"
    return Row(identity, task, _prompt(sample["arguments"]), _answer(sample["filtered_resps"]), values)


def _values(rows: Mapping[str, Row], identity: str) -> Mapping[str, float]:
    return rows[identity].values if identity in rows else {}


def _prompt(arguments: Any) -> str:
    """Return the context of the first request of a document."""
    first = next(iter(arguments.values())) if isinstance(arguments, Mapping) else arguments[0]
    found = first["arg_0"] if isinstance(first, Mapping) else first[0]
    return str(found)


def _answer(responses: Any) -> str:
    return responses[0] if len(responses) == 1 and isinstance(responses[0], str) else str(list(responses))


def _is_mean(rows: Iterable[Row], name: str, value: float) -> bool:
    values = [row.values[name] for row in rows if name in row.values]
    return bool(values) and math.isclose(math.fsum(values) / len(values), value, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
