"""Rows in temporary files: what is read is what was added, and little of it stays in memory."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

from rlhf_core.config.data import Files
from rlhf_core.data.files import make_tables
from rlhf_core.data.limits import DropReport, Origin
from rlhf_core.data.rows import RowFile, RowProgress, StoredRows, changed, selected
from rlhf_core.data.tables import Demonstration
from rlhf_core.types import Message

ROWS = [
    Demonstration(f"{n}", (Message("user", f"{n}?"), Message("assistant", "long " * 2000, '{"a": 1}')), "s")
    for n in range(300)
]
"""3 MB of text in all; 1 MB is written at a time."""


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_rows_come_back_as_they_were_from_the_file_and_before_they_are_written(tmp_path):
    rows = StoredRows[Demonstration](RowFile(Demonstration, Message, folder=tmp_path))
    for row in ROWS:
        rows.append(row)
        assert rows[-1] == row
    assert list(rows) == ROWS and [rows[place] for place in (299, 0, 150)] == [ROWS[299], ROWS[0], ROWS[150]]
    assert list(rows[:2]) == ROWS[:2] and len(rows[5:]) == 295
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_values_of_any_type_are_kept(tmp_path):
    rows = StoredRows[Any](RowFile(Origin, folder=tmp_path))
    values = [Origin("f", 3), {"text": "\ud83d", "none": None, "number": float("inf")}, (1, 2.5, b"3"), tmp_path]
    for value in (*values, nested(100_000), lambda: 7):
        rows.append(value)
    assert list(rows[:4]) == values
    assert rows[5]() == 7
    value = rows[4]  # too deep for pickle, and for a comparison
    for _ in range(100_000):
        (value,) = value
    assert value == []


def test_rows_are_left_out_and_changed_without_writing_the_others_again(tmp_path):
    rows = StoredRows[int](RowFile(folder=tmp_path))
    for number in range(10, 16):
        rows.append(number)

    def change(number: int) -> int | None:
        return None if number % 3 == 0 else -number if number == 13 else number

    assert [*changed(rows, change)] == changed([*rows], change) == [10, 11, -13, 14]
    assert list(changed(rows, change).numbers) == [0, 1, 7, 4]  # 7: the second -13 that was written
    assert [*selected(rows, [3, 0])] == [13, 10] and selected((5, 6, 7), [2, 0]) == (7, 5)


def test_tables_of_long_rows_take_little_memory(tmp_path):
    # 1,000 rows of 16 KB are 16 MB of text. In memory are 2 files' last MB, and 100s of bytes of each row.
    text = "w" * 8000
    rows = [{"question": f"{n} {text}?", "answer": f"{n} {text}"} for n in range(1000)]
    Path(tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    del rows
    config = Files(sources=({"name": "q", "path": str(tmp_path / "q.jsonl"), "use": {"demonstrations": 1.0}},))  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        tables, origins = make_tables(config, seed=1, report=DropReport(), folder=tmp_path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tables.demonstrations) + len(tables.eval_demonstrations) == len(origins) == 1000
    assert held < 4_000_000 and peak < 8_000_000


def test_a_loop_over_rows_shows_its_rate_at_most_every_few_seconds(tmp_path):
    seconds, said = iter(range(0, 100, 2)), list[tuple[int, int, str]]()
    progress = RowProgress(lambda *one: said.append(one), 4, clock=lambda: float(next(seconds)))
    progress.begin(1, "cleaning")
    rows = StoredRows(RowFile(folder=tmp_path, progress=progress), [])
    for number in range(8):
        rows.append(number)
    assert list(rows) == list(range(8))
    # The clock goes on by 2 s a row: 3 rows begin within 5 s, and 2 rows are finished after 6 s.
    lines = [(1, 4, f"cleaning: {done} of 8 rows, 0 a second") for done in (2, 5)]
    assert said == [(1, 4, "cleaning"), *lines]
    assert list(progress.walk("abcd")) == ["a", "b", "c", "d"] and said[-1] == (1, 4, "cleaning: 2 rows, 0 a second")
