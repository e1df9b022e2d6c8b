import errno
import os
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store.layout import (
    _place,
    disk_is_full,
    folder_bytes,
    make_read_only,
    move,
    move_aside,
    naming_disk_errors,
    read_json,
    remove_tree,
    sweep_temporaries,
    write_json,
)


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "a" / "b" / "x.json"
    write_json(path, {"n": 1})
    write_json(path, {"n": 2}, durable=False)
    assert read_json(path) == {"n": 2}
    assert [item.name for item in path.parent.iterdir()] == ["x.json"]


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"n": 1})
    with pytest.raises(TypeError):
        write_json(path, {"n": object()})
    assert read_json(path) == {"n": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"', '{"n": ' + "[" * 100_000])
def test_what_is_not_a_json_table_reads_as_none(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    assert read_json(tmp_path / "x.json") is None
    assert read_json(tmp_path / "missing.json") is None


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (Path.mkdir, "is a folder"),
        (os.mkfifo, "is a pipe"),
        (lambda path: path.symlink_to(path.name), "is a link to itself"),
        (lambda path: path.symlink_to("/dev/zero"), "is a pipe, a device"),
    ],
)
def test_what_is_no_regular_file_is_one_error_and_not_waited_for(make, rule, tmp_path):
    make(tmp_path / "x.json")
    with pytest.raises(ArtifactError, match=f"^file = .*x.json': {rule}.*; move it away"):
        read_json(tmp_path / "x.json")


def test_a_read_only_folder_can_be_removed_and_moved(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "f").write_text("abc")
        make_read_only(tmp_path / name)
    assert (tmp_path / "one" / "sub" / "f").stat().st_mode & 0o777 == 0o444
    assert (tmp_path / "one").stat().st_mode & 0o222 == 0
    assert folder_bytes(tmp_path / "one") == 3
    remove_tree(tmp_path / "one")
    moved = move_aside(tmp_path / "two", tmp_path / "quarantine")
    assert not (tmp_path / "one").exists() and not (tmp_path / "two").exists()
    assert moved is not None and (moved / "sub" / "f").read_text() == "abc"
    assert move_aside(tmp_path / "two", tmp_path / "quarantine") is None
    remove_tree(tmp_path / "one")


def test_a_full_disk_is_named_whoever_reports_it(tmp_path):
    with pytest.raises(ArtifactError) as caught, naming_disk_errors(tmp_path):
        Path("/dev/full").write_text("x")
    text = str(caught.value)
    assert text.startswith(f"store = {str(tmp_path)!r}: the disk is full; free space, or ")
    assert text.endswith("nothing was lost, run the same command again to resume")
    assert disk_is_full(RuntimeError("write failed: No space left on device (os error 28)"), tmp_path)
    hidden = RuntimeError("save failed")
    hidden.__cause__ = OSError(errno.EDQUOT, "quota")
    assert disk_is_full(hidden, tmp_path)
    for folder in (tmp_path, tmp_path / "not there yet"):
        assert not disk_is_full(OSError(errno.EACCES, "no"), folder)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_store_that_cannot_be_written_to_is_named(tmp_path, number):
    said = r"cannot be written to .*; change the permissions"
    with pytest.raises(ArtifactError, match=said), naming_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "keys" / "x.json"))
    with pytest.raises(OSError, match="elsewhere"), naming_disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), "/elsewhere/x.json")


@pytest.fixture
def other_disk(monkeypatch) -> None:
    """Every rename between two folders fails as between two disks."""
    rename = Path.rename

    def across(self: Path, target: Path) -> Path:
        if self.parent != Path(target).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", across)


def test_what_is_moved_to_another_disk_is_whole_or_not_there(tmp_path, other_disk, monkeypatch):
    (tmp_path / "out" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "sub" / "f").write_text("abc")
    (tmp_path / "objects").mkdir()
    target = tmp_path / "objects" / "new"
    with monkeypatch.context() as patch:
        patch.setattr("rlhf_core.store.layout.fsync_tree", lambda folder: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            move(tmp_path / "out", target)
    assert list((tmp_path / "objects").iterdir()) == [] and (tmp_path / "out" / "sub" / "f").exists()
    move(tmp_path / "out", target)
    assert (target / "sub" / "f").read_text() == "abc" and not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="not empty"):
        move(tmp_path / "out", target)
    aside = move_aside(target, tmp_path / "quarantine")
    assert aside is not None and (aside / "sub" / "f").read_text() == "abc" and not target.exists()


def test_what_a_kill_left_of_a_move_is_swept(tmp_path):
    gone = 2**22 + 1  # above the largest process number
    left = tmp_path / f".object.{_place()}-{gone}-abcdef"
    left.mkdir()
    (left / "f").write_text("half")
    assert sweep_temporaries(tmp_path) == [left] and not left.exists()


def test_a_folder_that_is_removed_during_the_sweep_is_passed_over(tmp_path, monkeypatch):
    left = tmp_path / f".object.{_place()}-{2**22 + 1}-abcdef"
    left.mkdir()
    moved = tmp_path / f".part.{_place()}-{os.getpid()}-abcdef"
    (moved / "zero").mkdir(parents=True)
    scandir = os.scandir

    def removed_first(folder):
        if str(folder) == str(moved / "zero"):
            (moved / "zero").rmdir()
            moved.rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", removed_first)
    assert sweep_temporaries(tmp_path) == [left] and not moved.exists()
