"""Comparisons that annotators are asked about, their judgments, and the Parquet files of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import pyarrow as pa  # type: ignore[import-untyped]

from rlhf_core.data.parquet import MESSAGES, plain_messages, read_table, to_messages, write_table
from rlhf_core.types import Message

COMPARISONS_FILE = "comparisons.parquet"
JUDGMENTS_FILE = "judgments.parquet"

Choice: TypeAlias = Literal["first", "second", "tie", "both_bad"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
OTHER_SIDE: dict[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie", "both_bad": "both_bad"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt, in the order in which annotators see them.

    The policies are recorded and never shown. A comparison that `repeats` another one has its answers with the sides
    swapped, and measures whether an annotator agrees with itself. A comparison with an `expected` choice measures
    attention: one of its answers belongs to another prompt. Only the others train a reward model.

    >>> Comparison("c1", (Message("user", "Hi"),), "", "world", "Hello.", "No.", "sft", "sft").trains
    True
    """

    id: str
    prompt: tuple[Message, ...]
    label: str
    source: str
    first: str
    second: str
    first_policy: str
    second_policy: str
    repeats: str = ""
    expected: str = ""

    @property
    def trains(self) -> bool:
        """Return whether its judgment becomes a training pair."""
        return not self.repeats and not self.expected


@dataclass(frozen=True, slots=True)
class Judgment:
    """What one annotator chose for one comparison. `seconds` is 0.0 if the time was not measured.

    >>> Judgment("c1", "annotator-1", "first").choice
    'first'
    """

    comparison: str
    annotator: str
    choice: Choice
    reason: str = ""
    seconds: float = 0.0


COMPARISONS_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", MESSAGES),
        *((name, pa.string()) for name in ("label", "source", "first", "second", "first_policy", "second_policy")),
        ("repeats", pa.string()),
        ("expected", pa.string()),
    ]
)
JUDGMENTS_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("comparison", "annotator", "choice", "reason")),
        ("seconds", pa.float64()),
    ]
)


def write_comparisons(folder: Path, rows: Sequence[Comparison]) -> None:
    """Write `rows` to `folder/comparisons.parquet`."""
    tables = [asdict(row) | {"prompt": plain_messages(row.prompt)} for row in rows]
    write_table(folder / COMPARISONS_FILE, COMPARISONS_SCHEMA, tables)


def read_comparisons(folder: Path) -> list[Comparison]:
    """Return the rows of `folder/comparisons.parquet`, in order."""
    rows = read_table(folder / COMPARISONS_FILE, COMPARISONS_SCHEMA)
    return [Comparison(**row | {"prompt": to_messages(row["prompt"])}) for row in rows]


def write_judgments(folder: Path, rows: Sequence[Judgment]) -> None:
    """Write `rows` to `folder/judgments.parquet`."""
    write_table(folder / JUDGMENTS_FILE, JUDGMENTS_SCHEMA, [asdict(row) for row in rows])


def read_judgments(folder: Path) -> list[Judgment]:
    """Return the rows of `folder/judgments.parquet`, in order."""
    return [Judgment(**row) for row in read_table(folder / JUDGMENTS_FILE, JUDGMENTS_SCHEMA)]
