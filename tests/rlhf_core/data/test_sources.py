"""Every kind of file gives the same rows, each with the line it came from."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config.data import Source, Use
from rlhf_core.data.file_types import file_type, is_hub
from rlhf_core.data.sources import read
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
    "b.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode(), mtime=0)),
    "c.json": lambda path: path.write_text(json.dumps(ROWS)),
    "d.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps({"version": 1, "data": ROWS}).encode())),
    "e.csv": write_csv,
    "e.tsv": lambda path: path.write_text('prompt\tcompletion\n"a, b"\t1\n"c\nd"\t2\n'),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()),
    "i.jsonl.zst": lambda path: path.write_bytes(pa.Codec("zstd").compress(LINES.encode(), asbytes=True)),
    "f.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "g.arrow": write_arrow_file,
    "h.arrow": write_arrow_stream,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    assert [record.row for record in read(source(tmp_path / name))] == ROWS


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        *(
            (f"x{end}", LFS, "is a pointer of Git LFS.*git lfs pull")
            for end in (".jsonl", ".csv.gz", ".parquet", ".arrow")
        ),
        ("x.jsonl", LINES.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ("x.jsonl.gz", gzip.compress(LINES.encode("utf-16"), mtime=0), "is UTF-16; save it as UTF-8"),
        ("x.csv", "prompt,completion\n".encode("utf-16-le"), "is UTF-16, or no text; save it as UTF-8"),
        ("x.json", '[{"prompt": "caf\xe9"}]'.encode("latin-1"), "cannot be read as json .*; save it as UTF-8"),
        ("x.jsonl", json.dumps(ROWS).encode(), "is one value of JSON.*set file_type = 'json'"),
        ("x.jsonl", json.dumps({"data": ROWS}, indent=1).encode(), "is one value of JSON.*set file_type = 'json'"),
        ("x.csv", b"prompt;completion\na;b\n", "is separated by semicolons; write it with commas"),
        ("x.csv", b"prompt\tcompletion\na\tb\n", "is separated by tabs; set file_type = 'tsv'"),
        ("x.tsv", b"prompt,completion\na,b\n", "is separated by commas; set file_type = 'csv'"),
        ("x.csv", json.dumps(ROWS).encode(), "is JSON; set file_type = 'json', or 'jsonl'"),
        ("x.tsv.gz", gzip.compress(LINES.encode(), mtime=0), "is JSON; set file_type = 'json', or 'jsonl'"),
        ("x.jsonl.gz", LINES.encode(), "is not packed, though its name ends in .gz; rename it"),
        ("x.jsonl.zst", LINES.encode(), "is not packed, though its name ends in .zst; rename it"),
        ("x.jsonl", gzip.compress(LINES.encode(), mtime=0), "is packed with gzip; let its name end in .gz"),
        ("x.csv", b"PAR1 and so on", "is Parquet; set file_type = 'parquet'"),
        ("x.jsonl", b"\n<!DOCTYPE html><html></html>", "is a web page; download the file itself"),
    ],
)
def test_a_file_of_another_type_is_refused_with_what_it_is(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"sources\[s\]\.path = '.*{name}': {reason}"):
        list(read(source(tmp_path / name)))


def test_a_folder_and_a_pattern_are_read_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    names = ("deep/part-0.jsonl", "part-1.jsonl.gz", "part-2.jsonl", "README.md", ".part.jsonl", "_part.jsonl")
    for name in names:
        (tmp_path / name).write_bytes((gzip.compress if name.endswith(".gz") else bytes)(LINES.encode()))
    records = list(read(source(tmp_path)))
    assert [record.row for record in records] == ROWS * 3
    assert [(record.origin.file, record.origin.line) for record in records[2:4]] == [
        (str(tmp_path / "part-1.jsonl.gz"), 1),
        (str(tmp_path / "part-1.jsonl.gz"), 2),
    ]
    for pattern, count in (("part-*", 2), ("**/part-[02].jsonl", 2), ("part-2.json?", 1)):
        found = source(tmp_path / pattern)
        assert (file_type(found), len(list(read(found)))) == ("jsonl", 2 * count)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "no file there ends in"),
        (["a.jsonl", "b.csv"], r"has files of several types, \['csv', 'jsonl'\]"),
        (["train-0.jsonl", "test-0.jsonl"], r"has files of several splits, \['test', 'train'\]"),
        (["train/0.jsonl", "test/0.jsonl"], r"has files of several splits, \['test', 'train'\]"),
        (["part-0.jsonl", "eval.jsonl"], r"has files of several splits, \['none in the name', 'eval'\]"),
    ],
)
def test_a_folder_of_which_files_are_meant_is_not_clear_is_refused(
    names: list[str], reason: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    for path in (tmp_path, tmp_path / "**/*.*"):
        with pytest.raises(ConfigError, match=reason):
            file_type(source(path))


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
    with pytest.raises(DataError, match=r"absent\.jsonl.*does not exist"):
        list(read(source(tmp_path / "absent.jsonl")))
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(DataError, match=r"x\.parquet.*cannot be read as parquet"):
        list(read(source(tmp_path / "x.parquet")))
    (tmp_path / "x.json").write_text('[{"a": 1},\n oops]')
    with pytest.raises(DataError, match=r"x\.json:2"):
        list(read(source(tmp_path / "x.json")))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(LINES.encode(), mtime=0)[:-9])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz.*cannot be read as jsonl"):
        list(read(source(tmp_path / "x.jsonl.gz")))


@pytest.mark.parametrize("revision", ["", "main", "v1.0", "0" * 39, "G" * 40])
def test_a_hub_name_needs_a_full_commit(revision: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.sources\[s\]\.revision = '{revision}'.*copy the 40-digit hash"):
        file_type(source("owner/name", revision=revision))


def test_a_hub_name_with_its_commit_is_a_hub_source() -> None:
    assert is_hub(source("owner/name", revision="0" * 40))


@pytest.mark.parametrize("place", ["rows.jsonl", "zero.jsonl"])
def test_a_pipe_or_a_device_is_refused_and_not_read(place: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"data\.sources\[s\]\.path = .*: a pipe, a device or a socket"):
        file_type(source(tmp_path / place))


def test_a_name_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a folder, a Hub name, nor a file"):
        file_type(source(tmp_path / "data.xyz"))


def problems(path: Path) -> list[str]:
    return [record.problem for record in read(source(path))]


def test_a_row_that_python_cannot_read_is_a_problem_of_that_row_alone(tmp_path: Path) -> None:
    lines = [b'{"prompt": "a"}', b"[" * 100_000, b'{"prompt": "b"}', b"\xff\xfe", b'{"prompt": "c"}']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    deep, none = problems(tmp_path / "x.jsonl")[1:4:2]
    assert deep == "not JSON: brackets too deep"
    assert none.startswith("not JSON: Expecting value")
    assert [record.row for record in read(source(tmp_path / "x.jsonl"))][::2] == [{"prompt": one} for one in "abc"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_number_of_five_thousand_digits_keeps_them(name: str, tmp_path: Path) -> None:
    digits = "9" * 5000
    row = f'{{"prompt": "a", "label": {digits}}}'
    (tmp_path / name).write_text(row if name == "x.jsonl" else f"[{row}]")
    (record,) = read(source(tmp_path / name))
    assert str(record.row["label"]) == digits


def test_a_key_that_an_object_has_twice_spoils_its_row(tmp_path: Path) -> None:
    twice = '{"prompt": "a", "label": {"b": 1, "b": 2}}'
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "c"}}\n{twice}\n')
    (tmp_path / "x.csv").write_text('prompt,label\nc,1\na,"{""b"": 1, ""b"": 2}"\n')
    for name in ("x.jsonl", "x.csv"):
        assert problems(tmp_path / name) == [
            "",
            "a key twice: an object of JSON has 'b' more than once; keep one of them",
        ]
    (tmp_path / "x.json").write_text(f"[{twice}]")
    with pytest.raises(DataError, match=r"x\.json.*a key twice"):
        problems(tmp_path / "x.json")


def test_a_json_file_with_brackets_too_deep_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"x\.json:1.*brackets too deep"):
        list(read(source(tmp_path / "x.json")))


def test_a_date_that_python_has_not_is_a_problem_of_its_row_alone(tmp_path: Path) -> None:
    days = pa.array([0, 10**8, 1], pa.int32()).cast(pa.date32())
    table = pa.table({"prompt": ["a", "b", "c"], "day": days})
    pq.write_table(table, tmp_path / "x.parquet")
    with pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        first, second, third = read(source(tmp_path / name))
        assert (first.row["prompt"], third.row["prompt"]) == ("a", "c")
        assert (first.problem, third.problem) == ("", "")
        assert second.problem.startswith("not readable: ") and second.row == {}


def test_a_date_that_python_has_not_in_a_saved_dataset_too(tmp_path: Path) -> None:
    from datasets import Dataset

    days = pa.array([0, 10**8, 1], pa.int32()).cast(pa.date32())
    Dataset(pa.table({"prompt": ["a", "b", "c"], "day": days})).save_to_disk(tmp_path / "x")
    assert [bool(problem) for problem in problems(tmp_path / "x")] == [False, True, False]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress("".join(f'{{"prompt": "{n * n}"}}\n' for n in range(500)).encode()))
    packed[40:60] = b"\xff" * 20
    (tmp_path / "x.jsonl.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.jsonl\.gz.*cannot be read as jsonl"):
        list(read(source(tmp_path / "x.jsonl.gz")))


def test_damaged_offsets_of_an_arrow_file_are_not_followed(tmp_path: Path) -> None:
    write_arrow_file(tmp_path / "x.arrow")
    content = bytearray((tmp_path / "x.arrow").read_bytes())
    at = content.index(b"\0\0\0\0\x04\0\0\0\x07\0\0\0")  # where the two prompts begin and end
    content[at + 4 : at + 8] = b"\xff\xff\xff\x7f"
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.arrow.*cannot be read as arrow"):
        list(read(source(tmp_path / "x.arrow")))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,prompt\na,b\n")
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), tmp_path / "x.parquet"
    )
    for name in ("x.csv", "x.parquet"):
        with pytest.raises(DataError, match="has more than one column 'prompt'; rename one of them"):
            list(read(source(tmp_path / name)))


def test_quotes_that_are_out_of_place_swallow_no_rows_in_silence(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('prompt,completion\n"a"b,1\nc,2\n')
    first, second = read(source(tmp_path / "x.csv"))
    assert first.problem.startswith("not CSV: ") and first.problem.endswith("in lines 2 to 2")
    assert second.row == {"prompt": "c", "completion": "2"}
    (tmp_path / "y.csv").write_text('prompt,completion\na,1\n"b,2\n' + "c,3\n" * 100)
    with pytest.raises(DataError, match="a quote that begins in line 3 or later is not closed"):
        list(read(source(tmp_path / "y.csv")))


def test_a_damaged_description_of_a_saved_dataset_is_named(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    (tmp_path / "one" / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"is a folder, but not one that `Dataset\.save_to_disk` wrote"):
        list(read(source(tmp_path / "one")))
