"""Parts that are written in the background: done, failed, died and stalled are told apart."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.store.checkpoints import wait_for_parts, write_part

FORK = multiprocessing.get_context("fork")


def test_waiting_ends_when_every_part_is_whole(tmp_path: Path) -> None:
    go = threading.Event()

    def write(name: str) -> None:
        assert go.wait(30)
        (tmp_path / name).write_text("x")

    write_part(tmp_path / "policy", "rank_0", lambda: write("a"))
    write_part(tmp_path, "rank_0", lambda: write("b"))
    threading.Timer(0.05, go.set).start()
    wait_for_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "policy"], "no note is left"


def test_without_parts_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    began = time.monotonic()
    wait_for_parts(tmp_path)
    wait_for_parts(tmp_path / "not there")
    assert time.monotonic() - began < 5.0


def test_a_part_that_failed_is_named_with_the_reason(tmp_path: Path) -> None:
    def write() -> None:
        raise ValueError("a strange tensor")

    write_part(tmp_path / "policy", "rank_3", write)
    with pytest.raises(ArtifactError, match=r"'policy/rank_3': could not be written \(ValueError: a strange tensor\)"):
        wait_for_parts(tmp_path)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_part(tmp_path, "rank_0", write)
    with pytest.raises(ArtifactError, match="the disk is full; free space"):
        wait_for_parts(tmp_path)


def _begin_and_hang(folder: Path) -> None:
    write_part(folder, "rank_1", lambda: time.sleep(600))
    (folder / "begun").touch()
    time.sleep(600)


def test_a_writer_that_was_killed_is_noticed_at_once(tmp_path: Path) -> None:
    process = FORK.Process(target=_begin_and_hang, args=(tmp_path,))
    process.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.005)
    with pytest.raises(ArtifactError, match=r"nothing was written for 0\.05 s"):
        wait_for_parts(tmp_path, stalled_s=0.05)
    os.kill(process.pid or 0, 9)
    process.join()
    with pytest.raises(ArtifactError, match=r"checkpoint\.part = 'rank_1': its writer died; run again"):
        wait_for_parts(tmp_path)


def test_a_folder_that_was_given_up_meanwhile_harms_nobody(tmp_path: Path) -> None:
    gone = threading.Event()

    def write() -> None:
        assert gone.wait(30)
        raise ValueError("there is no folder any more")

    folder = tmp_path / "given up"
    write_part(folder, "rank_0", write)
    folder.rename(tmp_path / "elsewhere")
    gone.set()
    for thread in threading.enumerate():
        if thread.name == "checkpoint part rank_0":
            thread.join()
    assert not folder.exists()
