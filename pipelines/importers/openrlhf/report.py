"""Format the report of `rlhf import-openrlhf`: every flag in one of three lists, and what is left to do."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipelines.importers.openrlhf.draft import Fate
from pipelines.importers.openrlhf.translate import Translation

_LISTS: tuple[tuple[Fate, str, str], ...] = (
    ("translated", "Translated", "into"),
    ("ignored", "Does not matter here", "because"),
    ("not translatable", "Not translatable", "why, and what comes nearest"),
)


def report(translation: Translation) -> Iterator[RenderableType]:
    """Yield a table for each list that has a flag, and the notes."""
    for fate, title, heading in _LISTS:
        rows = [outcome for outcome in translation.outcomes if outcome.fate == fate]
        if not rows:
            continue
        table = Table(title=f"{title} ({len(rows)})", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("command", "flag", heading):
            table.add_column(column, overflow="fold")
        for row in rows:
            # Text, because a value such as [ppo] would be read as markup.
            cells = (row.command, f"{row.flag} {row.text}".strip(), "; ".join(row.what))
            table.add_row(*(Text(cell) for cell in cells))
        yield table
        yield Text("")
    for note in translation.notes:
        yield Text(f"to do: {note}")
