"""Every kind of file gives the same rows, each with the line it came from."""

import csv
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
from rlhf_core.data.turns import truth
from rlhf_core.errors import ConfigError, DataError

ROWS = [{"prompt": "a, b", "completion": "1"}, {"prompt": "c\nd", "completion": "2"}]


def source(path: Path | str, **options: Any) -> Source:
    return Source(name="s", path=str(path), use=Use(demonstrations=1.0), **options)


def rows_of(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    return [record.row for record in read(source(path, **options))]


def problems(path: Path) -> list[str]:
    return [record.problem for record in read(source(path))]


def write_arrow(path: Path, table: pa.Table, kind: Callable[..., Any] = pa.ipc.new_file) -> None:
    with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table)


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
WRITERS: dict[str, Callable[[Path], Any]] = {
    "a.jsonl": lambda path: path.write_text(LINES),
    "b.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode(), mtime=0)),
    "c.json": lambda path: path.write_text(json.dumps(ROWS)),
    "d.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps({"version": 1, "data": ROWS}).encode())),
    "e.csv": lambda path: path.write_text('prompt,completion\n"a, b",1\n"c\nd",2\n'),
    "e.tsv": lambda path: path.write_text('prompt\tcompletion\n"a, b"\t1\n"c\nd"\t2\n'),
    "bom.jsonl": lambda path: path.write_bytes(b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode()),
    "i.jsonl.zst": lambda path: path.write_bytes(pa.Codec("zstd").compress(LINES.encode(), asbytes=True)),
    "f.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "g.arrow": lambda path: write_arrow(path, pa.Table.from_pylist(ROWS)),
    "h.arrow": lambda path: write_arrow(path, pa.Table.from_pylist(ROWS), pa.ipc.new_stream),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name, tmp_path):
    WRITERS[name](tmp_path / name)
    assert rows_of(tmp_path / name) == ROWS


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
def test_a_file_of_another_type_is_refused_with_what_it_is(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"sources\[s\]\.path = '.*{name}': {reason}"):
        problems(tmp_path / name)


def test_a_folder_and_a_pattern_are_read_file_by_file(tmp_path):
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
def test_a_folder_of_which_files_are_meant_is_not_clear_is_refused(names, reason, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LINES)
    for path in (tmp_path, tmp_path / "**/*.*"):
        with pytest.raises(ConfigError, match=reason):
            file_type(source(path))


def test_a_saved_dataset_and_one_split_of_a_saved_dictionary_are_read(tmp_path):
    from datasets import Dataset, DatasetDict

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    DatasetDict({"test": Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "many")
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "many", split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"choose from \['test'\]"):
        rows_of(tmp_path / "many")
    (tmp_path / "one" / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"is a folder, but not one that `Dataset\.save_to_disk` wrote"):
        rows_of(tmp_path / "one")


def test_a_line_that_is_not_json_is_a_problem_of_that_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": \n[1]\n')
    records = list(read(source(tmp_path / "x.jsonl")))
    assert [record.origin.line for record in records] == [1, 3, 4]
    assert records[0].problem == ""
    assert records[1].problem.startswith("not JSON: Expecting value at column")
    assert records[2].problem.startswith("not a row: list")


def test_cells_of_csv_are_counted_and_turns_in_one_are_read_as_json(tmp_path):
    WRITERS["e.csv"](tmp_path / "x.csv")
    assert [record.origin.line for record in read(source(tmp_path / "x.csv"))] == [2, 4]  # the last line of a row
    (tmp_path / "x.csv").write_text("prompt,completion\na\na,b,c\na,b\n")
    assert [bool(problem) for problem in problems(tmp_path / "x.csv")] == [True, True, False]
    (tmp_path / "x.csv").write_text('messages\n"[{""role"": ""user"", ""content"": ""Hi""}]"\n[sic]\n')
    assert rows_of(tmp_path / "x.csv") == [{"messages": [{"role": "user", "content": "Hi"}]}, {"messages": "[sic]"}]


def damaged_archive() -> bytes:
    packed = bytearray(gzip.compress("".join(f'{{"prompt": "{n * n}"}}\n' for n in range(500)).encode()))
    packed[40:60] = b"\xff" * 20
    return bytes(packed)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent.jsonl", None, "'.*absent.jsonl': does not exist"),
        ("x.parquet", b"no", r"x\.parquet.*cannot be read as parquet"),
        ("x.json", b'[{"a": 1},\n oops]', r"x\.json:2"),
        ("x.json", b"[" * 100_000, r"x\.json:1.*brackets too deep"),
        ("x.json", b'[{"prompt": "a", "label": {"b": 1, "b": 2}}]', r"x\.json.*a key twice"),
        ("x.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], r"x\.jsonl\.gz.*cannot be read as jsonl"),
        ("x.jsonl.gz", damaged_archive(), r"x\.jsonl\.gz.*cannot be read as jsonl"),
        ("x.csv", b"prompt,prompt\na,b\n", "has more than one column 'prompt'; rename one of them"),
        ("x.csv", b'prompt,completion\na,1\n"b,2\n' + b"c,3\n" * 100, "a quote that begins in line 3 or later is not"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason):
        problems(tmp_path / name)


@pytest.mark.parametrize("revision", ["", "main", "v1.0", "0" * 39, "G" * 40])
def test_a_hub_name_needs_a_full_commit(revision):
    with pytest.raises(ConfigError, match=rf"data\.sources\[s\]\.revision = '{revision}'.*copy the 40-digit hash"):
        file_type(source("owner/name", revision=revision))
    assert is_hub(source("owner/name", revision="0" * 40))


@pytest.mark.parametrize("place", ["rows.jsonl", "zero.jsonl"])
def test_a_pipe_or_a_device_is_refused_and_not_read(place, tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"data\.sources\[s\]\.path = .*: a pipe, a device or a socket"):
        file_type(source(tmp_path / place))
    with pytest.raises(ConfigError, match="neither a folder, a Hub name, nor a file"):
        file_type(source(tmp_path / "data.xyz"))


def test_a_row_that_python_cannot_read_is_a_problem_of_that_row_alone(tmp_path):
    lines = [b'{"prompt": "a"}', b"[" * 100_000, b'{"prompt": "b"}', b"\xff\xfe", b'{"prompt": "c"}']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    deep, none = problems(tmp_path / "x.jsonl")[1:4:2]
    assert deep == "not JSON: brackets too deep"
    assert none.startswith("not JSON: Expecting value")
    assert rows_of(tmp_path / "x.jsonl")[::2] == [{"prompt": one} for one in "abc"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_a_number_of_five_thousand_digits_keeps_them(name, tmp_path):
    digits = "9" * 5000
    row = f'{{"prompt": "a", "label": {digits}}}'
    (tmp_path / name).write_text(row if name == "x.jsonl" else f"[{row}]")
    (record,) = read(source(tmp_path / name))
    assert str(record.row["label"]) == digits


def test_a_key_that_an_object_has_twice_spoils_its_row(tmp_path):
    twice = '{"prompt": "a", "label": {"b": 1, "b": 2}}'
    (tmp_path / "x.jsonl").write_text(f'{{"prompt": "c"}}\n{twice}\n')
    (tmp_path / "x.csv").write_text('prompt,label\nc,1\na,"{""b"": 1, ""b"": 2}"\n')
    reason = "a key twice: an object of JSON has 'b' more than once; keep one of them"
    for name in ("x.jsonl", "x.csv"):
        assert problems(tmp_path / name) == ["", reason]


def test_a_date_that_python_has_not_is_a_problem_of_its_row_alone(tmp_path):
    from datasets import Dataset

    days = pa.array([0, 10**8, 1], pa.int32()).cast(pa.date32())
    table = pa.table({"prompt": ["a", "b", "c"], "day": days})
    pq.write_table(table, tmp_path / "x.parquet")
    write_arrow(tmp_path / "x.arrow", table)
    Dataset(table).save_to_disk(tmp_path / "saved")
    for name in ("x.parquet", "x.arrow", "saved"):
        first, second, third = read(source(tmp_path / name))
        assert (first.row["prompt"], third.row["prompt"]) == ("a", "c")
        assert (first.problem, third.problem) == ("", "")
        assert second.problem.startswith("not readable: ") and second.row == {}


def test_damaged_offsets_of_an_arrow_file_are_not_followed(tmp_path):
    write_arrow(tmp_path / "x.arrow", pa.Table.from_pylist(ROWS))
    content = bytearray((tmp_path / "x.arrow").read_bytes())
    at = content.index(b"\0\0\0\0\x04\0\0\0\x07\0\0\0")  # where the two prompts begin and end
    content[at + 4 : at + 8] = b"\xff\xff\xff\x7f"
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"x\.arrow.*cannot be read as arrow"):
        problems(tmp_path / "x.arrow")


def test_two_columns_of_one_name_are_refused(tmp_path):
    twins = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(twins, tmp_path / "x.parquet")
    write_arrow(tmp_path / "x.arrow", twins)
    for name in ("x.arrow", "x.parquet"):
        with pytest.raises(DataError, match="has more than one column 'prompt'; rename one of them"):
            problems(tmp_path / name)


def test_quotes_that_are_out_of_place_swallow_no_rows_in_silence(tmp_path):
    (tmp_path / "x.csv").write_text('prompt,completion\n"a"b,1\nc,2\n')
    first, second = read(source(tmp_path / "x.csv"))
    assert first.problem.startswith("not CSV: ") and first.problem.endswith("in lines 2 to 2")
    assert second.row == {"prompt": "c", "completion": "2"}


@pytest.mark.parametrize(
    ("columns", "header", "cell", "value"),
    [
        ({}, "completion", "[1, 2]", "[1, 2]"),
        ({}, "prompt", '{"a": 1}', '{"a": 1}'),
        ({}, "label", '["42"]', '["42"]'),
        ({}, "response_a", "[]", "[]"),
        ({"completion": "solution"}, "solution", "[1]", "[1]"),
        ({}, "completions", '["a", "b"]', ["a", "b"]),
        ({}, "messages", '[{"role": "user", "content": "a"}]', [{"role": "user", "content": "a"}]),
        ({}, "prompt", '[{"from": "human", "value": "a"}]', [{"from": "human", "value": "a"}]),
        ({}, "ratings", "[1, 2]", "[1, 2]"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_cells_of_text_stay_text_whatever_they_look_like(tmp_path, columns, header, cell, value, kind):
    path = tmp_path / f"x.{kind}"
    with path.open("w", newline="") as stream:
        csv.writer(stream, delimiter={"csv": ",", "tsv": "\t"}[kind]).writerows([["id", header], ["1", cell]])
    assert rows_of(path, columns=columns) == [{"id": "1", header: value}]


JUDGED = {"label": [0, 1, -1, None], "steps": [[0, 1], [], None, [1]], "inner": [{"a": 1}, {"a": 0}, None, {"a": None}]}


def classes(names: list[str]) -> Any:
    from datasets import ClassLabel, Dataset, Features, List

    one = ClassLabel(names=names)
    return Dataset.from_dict(JUDGED, features=Features({"label": one, "steps": List(one), "inner": {"a": one}}))


@pytest.mark.parametrize("kind", ["saved", "parquet", "arrow"])
def test_classes_have_their_names_at_any_depth(tmp_path, kind):
    made, path = classes(["good", "bad"]), tmp_path / f"x.{kind}"
    if kind == "saved":
        made.save_to_disk(str(path))
    elif kind == "parquet":
        made.to_parquet(str(path))
    else:
        write_arrow(path, made.data.table)
    assert [row["label"] for row in rows_of(path)] == ["good", "bad", None, None]
    assert [row["steps"] for row in rows_of(path)][:2] == [["good", "bad"], []]
    assert [row["inner"]["a"] for row in rows_of(path)[:2]] == ["bad", "good"]


@pytest.mark.parametrize("options", [{"label_coding": "verdict"}, {"format": "unpaired_preference"}])
def test_classes_whose_names_do_not_say_which_one_is_good_are_no_verdicts(tmp_path, options):
    for number, names in enumerate((["LABEL_0", "LABEL_1"], ["left", "right"])):
        classes(names).to_parquet(str(tmp_path / f"{number}.parquet"))
        assert rows_of(tmp_path / f"{number}.parquet")[0]["label"] == names[0]
        with pytest.raises(DataError, match="first replace GOOD_LABELS, which only you know") as refused:
            rows_of(tmp_path / f"{number}.parquet", **options)
        code = f"def to_row{str(refused.value).partition('def to_row')[2]}".replace("GOOD_LABELS", f"[{names[1]!r}]")
        (tmp_path / "rows.py").write_text(code)
        made = rows_of(tmp_path / f"{number}.parquet", **options, function=f"{tmp_path}/rows.py:to_row")
        assert [row["label"] for row in made] == [False, True, None, None]
    for bad, good in (
        ("bad", "good"),
        ("down", "up"),
        ("Thumbs-Down", "thumbs up"),
        ("reject", "accept"),
        ("no", "yes"),
    ):
        for names in ([bad, good], [good, bad]):  # numbers have any order
            classes(names).to_parquet(str(tmp_path / "y.parquet"))
            assert [truth(row["label"]) for row in rows_of(tmp_path / "y.parquet", **options)[:2]] == [
                names[0] == good, names[1] == good,
            ]  # fmt: skip
