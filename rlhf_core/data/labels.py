"""Decide over a whole source whether its labels are verdicts on the answers, or the answers that are expected.

A verdict that is read as an expected answer makes a bad answer one to imitate, so the first row alone does not decide,
and labels that can be read both ways are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from rlhf_core.config.data import Source
from rlhf_core.data.columns import is_empty
from rlhf_core.data.values import TRUTHS, WORTHS, Row, spelling
from rlhf_core.errors import DataError, explain

LabelReading = Literal["verdict", "answer"]

JUDGED_FORMATS = ("messages", "text", "alpaca", "prompt_completion", "question_answer", "unpaired_preference")
"""Formats of one answer, on which a label may be a verdict."""

_NUMBERS = ("0", "0.0", "1", "1.0", "-1", "-1.0")
_TELLING_ROWS = 8
"""Number of rows from which labels look like verdicts that are two in all, or mostly words such as `good`."""


def verdict_of(row: Row) -> Any:
    """Return the label of a row, or None if it has none; LLaMA-Factory calls it `kto_tag`."""
    return next((row[name] for name in ("label", "kto_tag") if not is_empty(row.get(name))), None)


def label_reading(source: Source, format_name: str, rows: Iterable[Row]) -> LabelReading:
    """Return how to read the labels of `source`, whose rows are in the format `format_name`.

    Raises DataError if they can be read in two ways.
    """
    if format_name not in JUDGED_FORMATS or source.format == "prompt_completion":
        return "answer"
    if source.format == "unpaired_preference":
        return "verdict"
    if source.label_coding != "auto":
        return source.label_coding
    found = list(rows)
    if any("thumbs" in row for row in found):
        return "verdict"
    said = Counter(spelling(label) for row in found if (label := verdict_of(row)) is not None)
    words = sum(count for label, count in said.items() if label in TRUTHS)
    others = sum(count for label, count in said.items() if label not in TRUTHS and label not in _NUMBERS)
    tables = {name for name in type(source.use).model_fields if getattr(source.use, name)}
    asks = tables <= {"prompts", "eval_prompts"}
    if words:
        if not (asks and said.keys() <= {"true", "false"} and any(isinstance(verdict_of(row), str) for row in found)):
            return "verdict" if words >= others else "answer"
    elif not said or asks or not _may_be_verdicts(said):
        return "answer"
    elif tables == {"preferences"} and said.keys() <= {"0", "1", "0.0", "1.0"}:
        return "verdict"
    raise DataError(
        explain(
            f"data.sources[{source.name}].label_coding",
            "auto",
            f"the labels are {', '.join(sorted(said))}: verdicts on the answers, or the answers that are expected",
            "set it to 'verdict' (bad answers are not imitated) or to 'answer'",
        )
    )


def refuse_verdict(row: Row, source: Source) -> None:
    """Raise DataError for a row with a verdict in a source whose labels, by their majority, are expected answers."""
    label = verdict_of(row)
    if source.label_coding == "auto" and source.format != "prompt_completion" and spelling(label) in TRUTHS:
        rule = "a verdict, where most labels are expected answers"
        raise DataError(f"mixed labels: {label!r} is {rule}; set label_coding = 'answer' or 'verdict'")


def _may_be_verdicts(said: Counter[str]) -> bool:
    words = sum(count for label, count in said.items() if label in WORTHS and label not in _NUMBERS)
    many = said.total() >= _TELLING_ROWS
    return said.keys() <= set(_NUMBERS) or (many and (len(said) == 2 or 2 * words >= said.total()))
