"""Render a draft as a TOML profile; a comment after each value names the flag that it came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipelines.flows.profile import PipelineConfig
from pipelines.importers.openrlhf.draft import Draft, Source

_SOURCES = "prepare_data.data"


def render(draft: Draft, *, name: str) -> str:
    """Return the profile; the tables are in the order of a pipeline."""
    tables: dict[str, list[str]] = {"": [f"name = {_literal(name)}"]}
    for key, value in draft.values.items():
        table, _, last = key.rpartition(".")
        comment = f"  # {_one_line(value.comment)}" if value.comment else ""
        tables.setdefault(table, []).append(f"{last} = {_literal(value.value)}{comment}")
    if draft.sources:
        tables.setdefault(_SOURCES, []).insert(0, 'type = "files"')
    blocks = []
    for table in sorted(tables, key=_order):
        blocks.append("\n".join([f"[{table}]"] * bool(table) + tables[table]))
        if table == _SOURCES:
            blocks += [_source(source) for source in draft.sources]
    return "\n\n".join(blocks) + "\n"


def _order(table: str) -> tuple[int, str]:
    """Return the sort key of a table; nested tables follow their parent."""
    sections = ["", *PipelineConfig.model_fields]
    return sections.index(table.partition(".")[0]), table


def _source(source: Source) -> str:
    share = int(100 / len(source.uses)) / 100
    fields = {key: value for key, value in source.fields.items() if value != {}}
    fields["use"] = dict.fromkeys(source.uses, share)
    comments = {"path": source.comment, "revision": "to be set: the commit of the data set"}
    lines = [
        f"{key} = {_literal(value)}" + (f"  # {_one_line(comments[key])}" if key in comments else "")
        for key, value in fields.items()
    ]
    return "\n".join([f"[[{_SOURCES}.sources]]", *lines])


def _literal(value: Any) -> str:
    """Return a TOML literal."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(inner) for inner in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows it, TOML does not
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _one_line(text: str) -> str:
    """Return `text` in a form that a comment allows: without line ends and control characters."""
    return "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
