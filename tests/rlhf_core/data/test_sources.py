"""Every kind of file gives the same rows, each with the line it came from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import Source, Use
from rlhf_core.data.sources import file_type, is_hub, read
from rlhf_core.errors import ConfigError, DataError

ROWS = [{"prompt": "a, b", "completion": "1"}, {"prompt": "c\nd", "completion": "2"}]


def source(path: Path | str, **options: Any) -> Source:
    return Source(name="s", path=str(path), use=Use(demonstrations=1.0), **options)


def write_csv(path: Path) -> None:
    path.write_text('prompt,completion\n"a, b",1\n"c\nd",2\n')


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_text(LINES),
    "b.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "c.json": lambda path: path.write_text(json.dumps(ROWS)),
    "d.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps({"version": 1, "data": ROWS}).encode())),
    "e.csv": write_csv,
    "f.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "g.arrow": write_arrow_file,
    "h.arrow": write_arrow_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert [record.row for record in read(source(tmp_path / name))] == ROWS


def test_a_saved_dataset_and_one_split_of_a_saved_dictionary_are_read(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"test": Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "many")
    assert [record.row for record in read(source(tmp_path / "one"))] == ROWS
    assert [record.row for record in read(source(tmp_path / "many", split="test"))] == ROWS[:1]
    with pytest.raises(DataError, match=r"choose from \['test'\]"):
        list(read(source(tmp_path / "many")))


def test_a_line_that_is_not_json_is_a_problem_of_that_line(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n[1]\n')
    records = list(read(source(tmp_path / "x.jsonl")))
    assert [record.origin.line for record in records] == [1, 3, 4]
    assert records[0].problem == ""
    assert records[1].problem.startswith("not JSON: Expecting value at column")
    assert records[2].problem.startswith("not a row: list")


def test_a_csv_row_with_too_few_or_too_many_cells_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,completion\na\na,b,c\na,b\n")
    assert [bool(record.problem) for record in read(source(tmp_path / "x.csv"))] == [True, True, False]


def test_turns_in_a_csv_cell_are_read_as_json(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""Hi""}]"\n[sic]\n')
    rows = [record.row for record in read(source(tmp_path / "x.csv"))]
    assert rows == [{"messages": [{"role": "user", "content": "Hi"}]}, {"messages": "[sic]"}]


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl.*is not there"):
        list(read(source(tmp_path / "absent.jsonl")))
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match=r"x\.parquet.*cannot be read as parquet"):
        list(read(source(tmp_path / "x.parquet")))
    (tmp_path / "x.json").write_text('[{"a": 1},\n oops]')
    with pytest.raises(DataError, match=r"x\.json:2"):
        list(read(source(tmp_path / "x.json")))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(LINES.encode())[:-9])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz.*cannot be read as jsonl"):
        list(read(source(tmp_path / "x.jsonl.gz")))


@pytest.mark.parametrize("revision", ["", "main", "v1.0", "0" * 39, "G" * 40])
def test_a_hub_name_needs_a_full_commit(revision: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.sources\[s\]\.revision = '{revision}'.*copy the 40-digit hash"):
        file_type(source("owner/name", revision=revision))


def test_a_hub_name_with_its_commit_is_a_hub_source() -> None:
    assert is_hub(source("owner/name", revision="0" * 40))


def test_a_name_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder, a Hub name, nor a file"):
        file_type(source(tmp_path / "data.xyz"))
