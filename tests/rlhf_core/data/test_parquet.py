"""One file of the store: there as a whole or not at all, and read only if it is what was asked for."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from rlhf_core.data import shards
from rlhf_core.data.shards import MESSAGES, plain_messages, read_table, replace_file, to_messages, write_table
from rlhf_core.errors import DataError
from rlhf_core.types import Message

SCHEMA = pa.schema([("id", pa.string()), ("messages", MESSAGES)])
TALK = (Message("user", "Hi"), Message("assistant", "Hello."))


def rows(*ids: str) -> list[dict[str, object]]:
    return [{"id": one, "messages": plain_messages(TALK)} for one in ids]


def test_rows_and_conversations_come_back(tmp_path: Path) -> None:
    write_table(tmp_path / "new" / "a.parquet", SCHEMA, rows("1", "2"))
    found = read_table(tmp_path / "new" / "a.parquet", SCHEMA)
    assert found == rows("1", "2") and to_messages(found[0]["messages"]) == TALK


def test_an_empty_table_keeps_its_columns(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", SCHEMA, [])
    assert read_table(tmp_path / "a.parquet", SCHEMA) == []


def test_only_the_columns_that_were_asked_for_are_read(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", SCHEMA, rows("1"))
    assert read_table(tmp_path / "a.parquet", pa.schema([("id", pa.string())])) == [{"id": "1"}]


def test_a_missing_table_and_a_foreign_table_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.parquet.*must exist"):
        read_table(tmp_path / "a.parquet", SCHEMA)
    write_table(tmp_path / "a.parquet", pa.schema([("id", pa.string())]), [{"id": "1"}])
    with pytest.raises(DataError, match=r"a\.parquet.*lacks the columns \['messages'\]"):
        read_table(tmp_path / "a.parquet", SCHEMA)


def test_a_write_that_is_interrupted_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "a.parquet", SCHEMA, rows("old"))
    replace_file(tmp_path / "b.json", b"old")

    def power_cut(path: Path) -> None:
        raise OSError("no space left on the disk")

    monkeypatch.setattr(shards, "fsync_path", power_cut)
    with pytest.raises(OSError, match="no space"):
        write_table(tmp_path / "a.parquet", SCHEMA, rows("new"))
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "b.json", b"new")
    assert read_table(tmp_path / "a.parquet", SCHEMA) == rows("old")
    assert (tmp_path / "b.json").read_bytes() == b"old"
    assert [path.name for path in tmp_path.glob("*.parquet")] == ["a.parquet"]  # half a file is not taken for a table


def test_a_file_has_its_name_only_once_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bool]] = []
    target = tmp_path / "b.json"
    monkeypatch.setattr(shards, "fsync_path", lambda path: synced.append((path.name, target.exists())))
    replace_file(target, b"new")
    assert [there for _, there in synced] == [False, True] and synced[1][0] == tmp_path.name
    assert target.read_bytes() == b"new" and [path.name for path in tmp_path.iterdir()] == ["b.json"]
