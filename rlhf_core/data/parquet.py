"""Read and write single Parquet files of the store.

Every write is atomic and flushed to disk before the file gets its name, so an existing file is always complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from rlhf_core.errors import DataError, explain
from rlhf_core.store.layout import fsync_path
from rlhf_core.types import Message, Prompt

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
"""The column type of a conversation."""


MESSAGES_WITH_TOOLS = pa.list_(pa.struct([*MESSAGES.value_type, ("tool_fields", pa.string())]))
"""The column type of a conversation with tool calls."""
CONVERSATIONAL = pa.field("conversational", pa.bool_())
"""Column of prompts, and of answers to them, that is written only if a prompt was a list of turns in the data."""


def plain_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as values of a `MESSAGES` column. Raises DataError for tool calls, which it cannot hold."""
    if any(message.tool_fields for message in messages):
        rule = "this table holds no tool calls"
        raise DataError(explain("messages", [message.role for message in messages], rule, "use them in demonstrations"))
    return [{"role": message.role, "content": message.content} for message in messages]


def tool_messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as values of a `MESSAGES_WITH_TOOLS` column."""
    return [{"role": one.role, "content": one.content, "tool_fields": one.tool_fields} for one in messages]


def to_messages(rows: list[dict[str, str]]) -> tuple[Message, ...]:
    """Return values of a `MESSAGES` or `MESSAGES_WITH_TOOLS` column as messages."""
    return tuple(Message(**row) for row in rows)


def with_conversational(schema: pa.Schema, prompts: Iterable[Prompt]) -> pa.Schema:
    """Return `schema`, with the column `conversational` if it is true for one of `prompts`."""
    return schema.append(CONVERSATIONAL) if any(prompt.conversational for prompt in prompts) else schema


def write_table(path: Path, schema: pa.Schema, rows: list[dict[str, Any]]) -> None:
    """Write `rows` to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), temporary)
    _put(temporary, path)


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(content)
    _put(temporary, path)


def _put(temporary: Path, path: Path) -> None:
    """Flush a written file to disk and then rename it, so that an existing file is complete even after a power cut."""
    fsync_path(temporary)
    temporary.replace(path)
    fsync_path(path.parent)


def read_table(path: Path, schema: pa.Schema, *, since: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the rows of `path`. Raises DataError if the file or a column of `schema` is missing.

    Columns named in `since` were added after the first files were written; if missing, their values are None.
    """
    if not path.is_file():
        raise DataError(explain("table", str(path), "must exist", "prepare the data again"))
    there = set(pq.read_schema(path).names)
    missing = sorted(set(schema.names) - there - set(since))
    if missing:
        raise DataError(explain("table", str(path), f"lacks the columns {missing}", "prepare the data again"))
    columns = [name for name in schema.names if name in there]
    rows: list[dict[str, Any]] = pq.read_table(path, columns=columns).to_pylist()
    absent = dict.fromkeys(name for name in schema.names if name not in there)
    return [row | absent for row in rows] if absent else rows
