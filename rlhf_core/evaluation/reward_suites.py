"""Score suites of chosen and rejected answers, such as RewardBench (arXiv 2403.13787), by subset.

A row has a `prompt`, a `chosen` answer, one `rejected` answer or a list of them, and a `subset`. It is right if the chosen
answer has a higher reward than every rejected one; a tie with the best of them counts half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rlhf_core.config.data import Source, Suite
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.sources import read
from rlhf_core.data.turns import Turns, turns_of
from rlhf_core.errors import DataError, explain
from rlhf_core.evaluation.intervals import SHARE, mean_interval
from rlhf_core.types import Message

_NOT_IN_A_NAME = re.compile(r"[^\w\-. ]")
FIGURES = ("accuracy", "low", "high", "prompts")
ONE_SUBSET = "all"
"""Subset of rows that name none."""


@dataclass(frozen=True, slots=True)
class SuiteRow:
    """A prompt with a chosen answer and one or several rejected ones."""

    prompt: Turns
    chosen: str
    rejected: tuple[str, ...]
    subset: str


def read_suite(name: str, suite: Suite) -> list[SuiteRow]:
    """Return the rows of a suite. Raises DataError for the first malformed one: a suite is compared only whole."""
    source = Source.model_validate(
        {"name": name, "path": suite.path, "file_type": suite.file_type, "use": {"preferences": 1.0}}
    )
    rows = []
    for record in read(source):
        try:
            if record.problem:
                raise DataError(record.problem)
            rows.append(_row(record.row, suite))
        except DataError as error:
            place = f"{Path(record.origin.file).name}:{record.origin.line}"
            remedy = "name its columns in the suite, or fix the row"
            raise DataError(explain(f"suites.{name}", place, str(error), remedy)) from error
    if not rows:
        raise DataError(explain(f"suites.{name}.path", suite.path, "has no rows", "give a file with rows"))
    return rows


def suite_report(
    rows: Sequence[SuiteRow],
    chat: ChatTemplate,
    score: Callable[[list[tuple[int, ...]]], Sequence[float]],
    *,
    max_length: int,
) -> dict[str, Any]:
    """Return the accuracy of a reward model on a suite and on each subset of it, with intervals.

    `macro_accuracy` is the mean over subsets, each of equal weight. `cut` counts rows with an answer that is longer than
    `max_length` tokens, which is scored as far as it goes, as it is in use.
    """
    asked: list[tuple[int, ...]] = []
    cut = 0
    for row in rows:
        rendered = [_rendered(row.prompt, answer, chat) for answer in (row.chosen, *row.rejected)]
        cut += any(len(ids) > max_length for ids in rendered)
        asked += [ids[:max_length] for ids in rendered]
    scores = iter(score(asked))
    hits = [_hit([next(scores) for _ in (row.chosen, *row.rejected)]) for row in rows]
    by_subset: dict[str, list[tuple[float, Turns]]] = {}
    for row, hit in zip(rows, hits, strict=True):
        by_subset.setdefault(row.subset, []).append((hit, row.prompt))
    subsets = {name: _accuracy(found) for name, found in sorted(by_subset.items())}
    macro = fmean(figures["accuracy"] for figures in subsets.values())
    return _accuracy([one for found in by_subset.values() for one in found]) | {
        "macro_accuracy": macro,
        "cut": cut,
        "subsets": subsets,
    }


def suite_metrics(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of suites that are metrics of a stage: of each as a whole, and of each subset."""
    metrics: dict[str, float] = {}
    for name, report in reports.items():
        metrics |= {f"suites/{name}/{key}": report[key] for key in (*FIGURES, "macro_accuracy")}
        for subset, figures in report["subsets"].items():
            metric = f"suites/{name}/{_NOT_IN_A_NAME.sub('_', subset)}"
            metrics |= {f"{metric}/{key}": figures[key] for key in FIGURES}
    return metrics


# ---------------------------------------------------------------- private


def _row(row: Mapping[str, Any], suite: Suite) -> SuiteRow:
    missing = [name for name in (suite.prompt, suite.chosen, suite.rejected) if row.get(name) is None]
    if missing:
        raise DataError(f"missing column: {missing[0]!r}; the row has {sorted(row)}")
    chosen, rejected = _answers(row[suite.chosen], "chosen"), _answers(row[suite.rejected], "rejected")
    if len(chosen) != 1:
        raise DataError(f"not one chosen answer: {len(chosen)}")
    subset = row.get(suite.subset)
    return SuiteRow(
        turns_of(row[suite.prompt], role="user"), chosen[0], rejected, ONE_SUBSET if subset is None else str(subset)
    )


def _answers(value: Any, name: str) -> tuple[str, ...]:
    answers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise DataError(f"not text: {name} must be a text or a list of texts")
    return answers


def _rendered(prompt: Turns, answer: str, chat: ChatTemplate) -> tuple[int, ...]:
    """Return the tokens up to the end of the answer, where a sampled answer ends too."""
    sample = chat.continuation(prompt, (Message("assistant", answer),), max_length=1 << 40)
    if sample is None:
        raise DataError(f"no tokens: the chat template leaves nothing of the answer {answer[:80]!r}")
    return sample.token_ids[: max(place for place, trained in enumerate(sample.loss_mask) if trained) + 1]


def _hit(scores: Sequence[float]) -> float:
    chosen, best = scores[0], max(scores[1:])
    return 1.0 if chosen > best else 0.5 if chosen == best else 0.0


def _accuracy(found: Sequence[tuple[float, Turns]]) -> dict[str, Any]:
    interval = mean_interval([hit for hit, _ in found], prompts=[prompt for _, prompt in found], bounds=SHARE)
    return {"rows": len(found)} | dict(zip(FIGURES, interval, strict=True))
