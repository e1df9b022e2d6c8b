"""Report dropped rows with file, line and reason, and counts per reason."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhf_core.errors import DataError, explain


@dataclass(frozen=True, slots=True)
class Origin:
    """The file and line of a row. `line` (or the row of a table) counts from 1, and is 0 for generated rows.

    >>> Origin("faq.jsonl", 7).line
    7
    """

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Drop:
    """One row that was left out. `reason` starts with a fixed phrase; details follow a colon."""

    source: str
    origin: Origin
    reason: str

    @property
    def kind(self) -> str:
        """The reason without its details."""
        return self.reason.partition(":")[0]


@dataclass(slots=True)
class DropReport:
    """The drops of a run, collected while rows are read, cleaned and limited."""

    drops: list[Drop] = field(default_factory=list)
    rows_read: Counter[str] = field(default_factory=Counter)
    unused: Counter[str] = field(default_factory=Counter)
    """Number of valid rows per source that no table needed (shares below 1, weights, `max_rows`)."""

    tied_pairs: Counter[str] = field(default_factory=Counter)
    """Number of pairs of equally good answers per source, in rows that have other pairs."""

    not_read: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Number of rows per source and column, or key of turns, whose content is in no table."""

    masked: Counter[str] = field(default_factory=Counter)
    """Number of masked pieces of personal data per kind."""

    def add(self, source: str, origin: Origin, reason: str) -> None:
        """Record that a row is left out."""
        self.drops.append(Drop(source, origin, reason))

    def counts(self) -> dict[str, int]:
        """Return the number of drops per kind of reason, most frequent first."""
        return dict(Counter(drop.kind for drop in self.drops).most_common())

    def check_malformed(self, source: str, malformed: Iterable[Drop], *, max_bad_fraction: float) -> None:
        """Raise DataError, naming the first malformed row, if more than `max_bad_fraction` of a source is malformed."""
        bad = list(malformed)
        if len(bad) > max_bad_fraction * self.rows_read[source]:
            first = bad[0]
            raise DataError(
                explain(
                    f"data.sources[{source}]",
                    f"{first.origin.file}:{first.origin.line}",
                    f"{first.reason} ({len(bad)} of {self.rows_read[source]} rows are malformed, "
                    f"at most {max_bad_fraction:.1%} may be)",
                    "fix the rows, set `format` and `columns` for this source, or raise data.max_bad_fraction",
                )
            )

    def to_json(self) -> dict[str, Any]:
        """Return the content of `validation.json`."""
        return {
            "rows_read": dict(self.rows_read),
            "unused": dict(self.unused),
            **({"tied_pairs": dict(self.tied_pairs)} if self.tied_pairs else {}),
            **(
                {"not_read": not_read}
                if (not_read := {name: dict(one) for name, one in self.not_read.items() if one})
                else {}
            ),
            **({"masked": dict(self.masked)} if self.masked else {}),
            "dropped": len(self.drops),
            "reasons": self.counts(),
            "drops": [{"source": drop.source, **asdict(drop.origin), "reason": drop.reason} for drop in self.drops],
        }
