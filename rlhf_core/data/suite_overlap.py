"""Leave out training rows that have prompts of the evaluation's suites, with a report for each suite."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.data.cleaning import Overlap
from rlhf_core.data.limits import DropReport, Origin, parts
from rlhf_core.data.rows import selected
from rlhf_core.data.tables import Tables
from rlhf_core.data.turns import Turns
from rlhf_core.types import Prompt

OVERLAPS = "suite_overlap.json"
TRAINING = ("demonstrations", "preferences", "feedback", "steps", "prompts")
"""Tables that are trained on. Held-out tables may share prompts with a suite."""
SHOWN = 200
"""Most characters of a prompt in the report."""


@dataclass(frozen=True, slots=True)
class SharedRow:
    """A training row that has a prompt of a suite; `words` tells whether it only shares words with it."""

    table: str
    id: str
    source: str
    origin: Origin
    prompt: str
    words: bool


@dataclass(frozen=True, slots=True)
class Overlaps:
    """The rows that were left out, and the numbers of prompts, by suite."""

    ngram: int
    prompts: Mapping[str, int]
    found: Mapping[str, Sequence[SharedRow]]
    texts: Mapping[str, Mapping[str, str]]
    """Suite -> ID of a prompt -> its last turn."""

    def rows(self) -> dict[str, int]:
        """Count the rows that were left out for each suite. A row counts for the first suite that it overlaps with."""
        return {name: len(rows) for name, rows in self.found.items()}

    def lines(self) -> list[str]:
        """One sentence for each suite with an overlap."""
        return [
            f"{len(rows)} training rows are left out for the suite {name}: they have {len({one.prompt for one in rows})} of its "
            f"{self.prompts[name]} prompts (in {OVERLAPS})"
            for name, rows in self.found.items()
            if rows
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON.

        For each suite: its prompts, the number found in training rows, and these rows by table.
        """
        return {
            "ngram": self.ngram,
            "suites": {
                name: {
                    "prompts": self.prompts[name],
                    "prompts_found": len({one.prompt for one in rows}),
                    "rows": dict(Counter(one.table for one in rows)),
                    "found": [self._row(name, one) for one in sorted(rows, key=_place)],
                }
                for name, rows in self.found.items()
            },
        }

    def _row(self, suite: str, one: SharedRow) -> dict[str, Any]:
        row = {"table": one.table, "id": one.id, "source": one.source, "file": one.origin.file, "line": one.origin.line}
        how = f"{self.ngram} words" if one.words else "whole prompt"
        return row | {"shares": how, "prompt": one.prompt, "text": self.texts[suite][one.prompt][:SHOWN]}


def without_prompts(
    tables: Tables,
    suites: Mapping[str, Sequence[Prompt]],
    ngram: int,
    origins: Mapping[str, Origin],
    report: DropReport,
) -> tuple[Tables, Overlaps]:
    """Drop training rows that have prompts of `suites`, and add them to `report`.

    A row has a prompt if it begins with it, or shares `ngram` words in a row with it in its prompt or an answer. System
    turns do not count: a question stays the same under another system turn.
    """
    known = {name: Overlap((spoken(one.messages) for one in prompts), ngram=ngram) for name, prompts in suites.items()}
    found: dict[str, list[SharedRow]] = {name: [] for name in suites}
    kept: dict[str, Any] = {}
    for table in TRAINING:
        rows, good = tables.named()[table], array("q")
        for place, row in enumerate(rows):
            prompt, answers = parts(row)
            hits = ((name, overlap.found(spoken(prompt), answers)) for name, overlap in known.items())
            name, hit = next(((name, hit) for name, hit in hits if hit), ("", None))
            if hit is None:
                good.append(place)
                continue
            shared = suites[name][hit.prompt].id
            found[name].append(SharedRow(table, row.id, row.source, origins[row.id], shared, hit.words))
            how = f"shares {ngram} words in a row with" if hit.words else "it begins with"
            report.add(row.source, origins[row.id], f"contaminated: {how} a prompt of the suite {name}")
        kept[table] = selected(rows, good)
    texts = {name: {one.id: one.messages[-1].content for one in prompts} for name, prompts in suites.items()}
    sizes = {name: len(prompts) for name, prompts in suites.items()}
    return replace(tables, **kept), Overlaps(ngram, sizes, found, texts)


def spoken(turns: Turns) -> Turns:
    """The turns except system turns."""
    return tuple(one for one in turns if one.role != "system")


def _place(row: SharedRow) -> tuple[str, int, str]:
    return row.origin.file, row.origin.line, row.table
