"""Damage rows in every format and file type: as values before writing, as bytes afterwards, or both."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from campaigns.fuzz.campaign import Wrong
from campaigns.fuzz.mutations import changed, damaged, odd, written
from rlhf_core.config.data import Files
from rlhf_core.data.files import make_tables, read_examples
from rlhf_core.data.formats import Example
from rlhf_core.data.limits import DropReport
from rlhf_core.data.sources import read
from rlhf_core.data.tables import (
    read_demonstrations,
    read_preferences,
    read_prompts,
    write_demonstrations,
    write_preferences,
    write_prompts,
)
from rlhf_core.errors import RlhfError

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".jsonl.gz", ".json.gz", ".csv.gz")
BATCH = 3
"""Rows per piece of a table, so that a row with an unreadable date has neighbors."""
TURNS = [{"role": "user", "content": "What is 6 times 7?"}, {"role": "assistant", "content": "It is 42."}]
SHARE = [{"from": "human", "value": "What is 6 times 7?"}, {"from": "gpt", "value": "It is 42."}]
TOOLS = [{"type": "function", "function": {"name": "add"}}]
ROWS: tuple[dict[str, Any], ...] = (
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": "Be brief."}, *TURNS], "label": "42"},
    {"conversations": SHARE, "system": "Be brief.", "tools": ""},
    {"text": "Six times seven is forty-two."},
    {"prompt": "What is 6 times 7?", "label": {"answer": 42, "inputs": ["6", "7"], "outputs": ["42"]}},
    {"prompt": "What is 6 times 7?", "label": ["assert f(6, 7) == 42"], "id": 7},
    {"prompt": TURNS[:1], "completion": TURNS[1:]},
    {"prompt": "What is 6 times 7?", "completion": "It is 42.", "label": True},
    {"prompt": "What is 6 times 7?", "chosen": "It is 42.", "rejected": "It is 43.", "margin": 0.5},
    {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "No."}]},
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello.", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
    {"prompt": "What is 6 times 7?", "completions": ["6 times 7", "is 42"], "labels": [True, 0.75]},
    {"question": "What is 6 times 7?", "answer": "6 * 7 = 42\n#### 42"},
)
ALL = {"demonstrations": 0.3, "preferences": 0.3, "prompts": 0.2, "eval_prompts": 0.1, "steps": 0.1}
USES = ({"demonstrations": 1.0}, {"preferences": 1.0}, {"prompts": 1.0}, {"steps": 1.0}, ALL)


class Target:
    """Damaged files of rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def attempt(self, rng: random.Random) -> None:
        """Read one file of rows, account for each row, and build tables from them."""
        rows = self._rows(rng)
        suffix = rng.choice(SUFFIXES)
        path = self._folder / f"rows{suffix}"
        data = packed(rows, suffix, rng)
        whole = rng.random() < 0.5
        path.write_bytes(data if whole else damaged(data, rng))
        config = Files(
            sources=({"name": "rows", "path": str(path), "use": rng.choice(USES)},),
            deduplicate=rng.random() < 0.5,
            decontaminate=rng.choice(("off", "prompt", "ngram")),
            max_bad_fraction=rng.choice((0.0, 0.3, 1.0)),
        )
        self._account(config, len(rows) if whole and any(rows) else None)  # rows without columns vanish in a table
        self._make(config)

    def _rows(self, rng: random.Random) -> list[dict[str, Any]]:
        """Generate rows in one format or several; few are valid everywhere, few are damaged everywhere."""
        formats = rng.sample(ROWS, k=1 if rng.random() < 0.8 else 3)
        rows = [dict(rng.choice(formats)) for _ in range(rng.randrange(1, 9))]
        for at, row in enumerate(rows):
            if rng.random() < 0.3:
                damaged_row = changed(row, rng)
                rows[at] = damaged_row if isinstance(damaged_row, dict) else row
            if rng.random() < 0.05:
                rows[at] = row | {rng.choice(("system", "tools", "tool_calls", "label")): rng.choice((TOOLS, odd(rng)))}
        return rows

    def _account(self, config: Files, written_rows: int | None) -> None:
        """Read all rows: each is an example, a tie or malformed, and each text of an example must be in its row."""
        source, report = config.sources[0], DropReport()
        try:
            examples = read_examples(source, max_bad_fraction=1.0, report=report)
        except RlhfError:
            return  # the source as a whole, which `_make` meets too
        records = list(read(source))
        kept, dropped = [example.origin for example in examples], [drop.origin for drop in report.drops]
        seen = [record.origin for record in records]
        if len(seen) != report.rows_read["rows"] or {*kept, *dropped} != {*seen} or {*kept} & {*dropped}:
            raise Wrong(f"of {len(seen)} rows {len({*kept})} are kept and {len({*dropped})} dropped")
        if written_rows is not None and written_rows != len(seen):
            raise Wrong(f"{written_rows} rows were written and {len(seen)} read")
        by_origin = {record.origin: record.row for record in records}
        for example in examples:
            _compare(example, by_origin[example.origin])

    def _make(self, config: Files) -> None:
        """Build tables, write the small ones, and read them again."""
        tables, origins = make_tables(config, seed=0, report=DropReport())
        if any(row.id not in origins for rows in tables.named().values() for row in rows):
            raise Wrong("a row of a table comes from nowhere")
        folder = self._folder / "tables"
        if tables.demonstrations:
            write_demonstrations(folder / "demonstrations.parquet", tables.demonstrations)
            _same(read_demonstrations(folder / "demonstrations.parquet"), tables.demonstrations)
        if tables.preferences:
            write_preferences(folder / "preferences.parquet", tables.preferences)
            _same(read_preferences(folder / "preferences.parquet"), tables.preferences)
        if tables.prompts:
            write_prompts(folder, tables.prompts)
            _same(read_prompts(folder), tables.prompts)


def packed(rows: Sequence[dict[str, Any]], suffix: str, rng: random.Random) -> bytes:
    """A file with the content `rows`."""
    kind, zipped = suffix.removesuffix(".gz"), suffix.endswith(".gz")
    if kind == ".jsonl":
        data = "".join(written(json.dumps(row, ensure_ascii=rng.random() < 0.8)) + "\n" for row in rows)
    elif kind == ".json":
        data = written(json.dumps(list(rows) if rng.random() < 0.5 else {"version": 1, "data": rows}))
    elif kind == ".csv":
        data = _csv(rows)
    else:
        return _table(rows, kind, rng)
    content = data.encode("utf-8", "surrogatepass")
    return gzip.compress(content, 1) if zipped else content


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = (row[name] if name in row else "" for name in names)
        writer.writerow([one if isinstance(one, str) else written(json.dumps(one)) for one in cells])
    return stream.getvalue()


def _table(rows: Sequence[dict[str, Any]], kind: str, rng: random.Random) -> bytes:
    """A Parquet or Arrow file of the rows; values that do not fit the type of their column are stored as text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row[name] if name in row else None for row in rows]) for name in names}
    if rng.random() < 0.2:
        columns["when"] = _times(len(rows), rng)
    table = pa.table(list(columns.values()), names=[_text(name) for name in columns])
    sink = pa.BufferOutputStream()
    if kind == ".parquet":
        pq.write_table(table, sink, row_group_size=BATCH, write_page_checksum=rng.random() < 0.5, version="2.6")
    else:
        new = pa.ipc.new_file if rng.random() < 0.5 else pa.ipc.new_stream
        with new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=BATCH)
    return bytes(sink.getvalue())


def _column(values: list[Any]) -> pa.Array:
    try:
        column = pa.array(values)
        pq.write_table(
            pa.table([column], names=["column"]), pa.BufferOutputStream()
        )  # a table without fields is impossible
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return pa.array([None if one is None else _text(one) for one in values], pa.string())
    return column


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value)).encode("utf-8", "replace").decode()


def _times(count: int, rng: random.Random) -> pa.Array:
    """Dates, some of them beyond Python's range, or times in an unknown zone."""
    days = [rng.choice((0, 1, 10**6, 10**8, -(10**8))) for _ in range(count)]
    kind = rng.choice(
        (pa.date32(), pa.timestamp("ms", "Nowhere/Atoll"), pa.timestamp("ms"), pa.duration("ms"), pa.binary())
    )
    if pa.types.is_binary(kind):
        return pa.array([rng.randbytes(8) for _ in range(count)], kind)
    number = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    return pa.array([day if pa.types.is_date32(kind) else day * 86_400_000 for day in days], number).cast(kind)


def _compare(example: Example, row: dict[str, Any]) -> None:
    """Raise Wrong if an example has a text that is not in its row, or a different label."""
    there = "\n".join(_texts(row))
    for message in (*example.prompt, *example.chosen, *example.rejected):
        if message.content not in there and "\n".join(example.steps) != message.content:
            raise Wrong(f"{message.content[:200]!r} is not in its row {str(row)[:500]}")
    given = row["label"] if "label" in row and "question" not in row else None
    if example.label and isinstance(given, (dict, list, int, float)) and not isinstance(given, Decimal):
        if json.loads(example.label) != given:
            raise Wrong(f"label {example.label[:200]!r} is not {str(given)[:200]}")
    elif example.label and isinstance(given, str) and example.label != given:
        raise Wrong(f"label {example.label[:200]!r} is not {given[:200]!r}")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _texts(inner)


def _same(read_again: Sequence[Any], rows: Sequence[Any]) -> None:
    if list(read_again) != list(rows):
        raise Wrong("a table is not what was written")
