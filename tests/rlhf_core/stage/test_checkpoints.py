import errno
import json
import logging
import multiprocessing
import os
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError, TrainerLostError, WorkerLostError
from rlhf_core.stage.checkpoints import Checkpoints, WriterDied, damaged_archive, wait_for_parts, write_part

FORK = multiprocessing.get_context("fork")


def _save(checkpoints: Checkpoints, step: int, *, metric: float | None = None) -> None:
    with checkpoints.saving(step, {"total": step * 10}, metric=metric) as folder:
        (folder / "w").write_text(str(step))
    checkpoints.settle()


def _steps(checkpoints: Checkpoints) -> list[int]:
    checkpoints.settle()
    return sorted(int(path.name.split("-")[1]) for path in checkpoints.root.iterdir())


def test_the_newest_checkpoint_comes_back_with_state_and_files(tmp_path):
    checkpoints = Checkpoints(tmp_path / "ckpt")
    assert checkpoints.latest() is None and checkpoints.best() is None
    _save(checkpoints, 9)
    _save(checkpoints, 10)
    latest = checkpoints.latest()
    assert (latest.step, latest.state, (latest.path / "w").read_text()) == (10, {"total": 100}, "10")
    assert _steps(checkpoints) == [10]


def test_the_old_checkpoint_is_there_until_the_new_one_is_whole(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    with checkpoints.saving(2, {}) as folder:
        latest = checkpoints.latest()
        assert latest is not None and latest.step == 1
        assert folder.is_dir() and not list(folder.iterdir())
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 2
    assert _steps(checkpoints) == [2]


def _raise(folder: Path) -> None:
    raise ValueError("no")


def _fill(file: Path) -> None:
    Path("/dev/full").write_text("x")  # a device that is always full


@pytest.mark.parametrize(
    ("save", "error", "text"),
    [
        (_raise, ValueError, "no"),
        (_fill, ArtifactError, r"the disk is full; free space, or .*run the same command again to resume"),
    ],
)
def test_an_error_while_saving_leaves_the_old_checkpoint_and_no_other_file(tmp_path, save, error, text):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    with pytest.raises(error, match=text), checkpoints.saving(2, {}) as folder:
        save(folder)
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["step"]
    assert _steps(checkpoints) == [1]


HARMS: dict[str, Callable[[Path], object]] = {
    "no marker": lambda torn: (torn / "COMPLETE").unlink(),
    "short file": lambda torn: (torn / "w").write_text(""),
    "other bytes": lambda torn: (torn / "w").write_text("3"),
    "missing file": lambda torn: (torn / "w").unlink(),
    "bad state": lambda torn: (torn / "state.json").write_text("?" * (torn / "state.json").stat().st_size),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_torn_checkpoint_is_skipped_with_a_warning(tmp_path, harm, caplog):
    checkpoints = Checkpoints(tmp_path, keep_best=2)
    _save(checkpoints, 1, metric=0.5)
    _save(checkpoints, 2, metric=0.5)
    torn = max(tmp_path.iterdir())
    HARMS[harm](torn)
    with caplog.at_level(logging.WARNING):
        latest = checkpoints.latest()
    assert latest is not None and latest.step == 1
    assert str(torn) in caplog.text
    _save(checkpoints, 3, metric=0.5)
    assert _steps(checkpoints) == [1, 3], "the torn one is removed once a newer one is whole"


def test_a_step_can_be_saved_again(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 5)
    with checkpoints.saving(5, {"total": -1}):
        pass
    latest = checkpoints.latest()
    assert latest is not None and latest.state == {"total": -1}
    assert _steps(checkpoints) == [5]


def test_the_best_by_metric_stay_beside_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_best=1)
    for step, metric in [(1, 0.9), (2, 0.9), (3, float("nan")), (4, 0.5), (5, None), (6, 0.1)]:
        _save(checkpoints, step, metric=metric)
    assert _steps(checkpoints) == [2, 6], "of equal metrics the newest is best"
    best = checkpoints.best()
    assert best is not None and (best.step, best.metric) == (2, 0.9)


def test_state_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"checkpoint\.state"), Checkpoints(tmp_path).saving(1, {"x": object()}):
        pass
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- in the background


def _in_background(checkpoints: Checkpoints, step: int, write: Callable[[Path], None]) -> None:
    with checkpoints.saving(step, {"total": step * 10}, metric=0.5) as folder:
        write_part(folder, "a", lambda: write(folder / "a"))


def test_training_goes_on_while_a_checkpoint_is_written_and_whoever_reads_waits(tmp_path):
    checkpoints, go = Checkpoints(tmp_path), threading.Event()
    _save(checkpoints, 1)
    state = {"total": 20}

    def write(file: Path) -> None:
        assert go.wait(30)
        file.write_text("a2")

    with checkpoints.saving(2, state) as folder:
        write_part(folder, "a", lambda: write(folder / "a"))
    state["total"] = -1
    seen = Checkpoints(tmp_path).latest()
    assert seen is not None and seen.step == 1, "to others the old one is the newest until the new one is whole"
    go.set()
    latest = checkpoints.latest()
    assert latest is not None and (latest.step, latest.state) == (2, {"total": 20})
    assert sorted(path.name for path in latest.path.iterdir()) == ["COMPLETE", "a", "state.json"]
    assert _steps(checkpoints) == [2]


def test_at_most_one_checkpoint_is_on_its_way(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_best=3)
    running, most = [], []

    def write(file: Path) -> None:
        running.append(file)
        most.append(len(running))
        time.sleep(0.02)
        running.remove(file)
        file.write_text("x")

    for step in (1, 2, 3):
        _in_background(checkpoints, step, write)
    assert _steps(checkpoints) == [1, 2, 3]
    assert most == [1, 1, 1]


def _fail(file: Path) -> None:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("write", "message"), [(_fail, "RuntimeError: no such luck"), (_fill, "the disk is full; free")]
)
def test_what_could_not_be_written_is_raised_once_in_the_training_thread(tmp_path, write, message):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    _in_background(checkpoints, 2, write)
    with pytest.raises(ArtifactError, match=message), checkpoints.saving(3, {}):
        raise AssertionError("the failure comes before the next one begins")
    assert _steps(checkpoints) == [1]
    _in_background(checkpoints.keeping(best=1), 4, write)
    with pytest.raises(ArtifactError, match=message):
        checkpoints.settle()
    checkpoints.settle()
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["step"], "no litter"


def test_a_failure_does_not_hide_the_error_that_ends_the_stage(tmp_path):
    checkpoints, error = Checkpoints(tmp_path), KeyboardInterrupt()
    _in_background(checkpoints, 1, _fail)
    checkpoints.settle_after(error)
    assert "the last checkpoint could not be written: " in error.__notes__[0]
    _in_background(checkpoints, 2, lambda file: file.write_text("x") and None)
    checkpoints.settle_after(KeyboardInterrupt())
    assert _steps(checkpoints) == [2]


def test_an_error_while_saving_waits_for_who_still_writes_and_leaves_no_litter(tmp_path):
    checkpoints = Checkpoints(tmp_path)

    def write(file: Path) -> None:
        time.sleep(0.05)
        file.write_text("x")

    with pytest.raises(ValueError, match="no"), checkpoints.saving(1, {}) as folder:
        write_part(folder, "a", lambda: write(folder / "a"))
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- damage


def _with_an_archive(checkpoints: Checkpoints, step: int) -> Path:
    with checkpoints.saving(step, {}, metric=0.5) as folder:
        with zipfile.ZipFile(folder / "w.pt", "w") as archive:
            archive.writestr("data/0", bytes([step]) * (2 << 20))
        (folder / "large.bin").write_bytes(bytes([step]) * (2 << 20))
    latest = checkpoints.latest()
    return latest.path


@pytest.mark.parametrize("name", ["w.pt", "large.bin"])
def test_a_run_is_not_resumed_from_flipped_bytes_but_from_the_checkpoint_before(tmp_path, name, caplog):
    checkpoints = Checkpoints(tmp_path, keep_best=2)
    _with_an_archive(checkpoints, 1)
    newest = _with_an_archive(checkpoints, 2)
    sound = checkpoints.to_resume(damaged_archive)
    assert sound is not None and sound.step == 2
    content = bytearray((newest / name).read_bytes())
    content[1 << 20] ^= 1
    (newest / name).write_bytes(content)
    sound = checkpoints.to_resume(damaged_archive)
    assert sound is not None and sound.step == 1
    assert f"{name} is not what was written" in caplog.text


def test_a_damaged_table_of_contents_is_damage_too(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    file = _with_an_archive(checkpoints, 1) / "w.pt"
    content = file.read_bytes()
    for place in range(1, 76):  # the last 76 bytes: the name, the sizes and the checksum of the one entry, and the end
        harmed = bytearray(content)
        harmed[-place] ^= 0xFF
        file.write_bytes(harmed)
        checkpoints.to_resume(damaged_archive)  # found or harmless, never an exception
    file.write_bytes(content[:-40] + b"\0" * 40)
    assert checkpoints.to_resume(damaged_archive) is None


# ---------------------------------------------------------------- kills


def _save_for_ever(root: Path, first: int) -> None:
    checkpoints = Checkpoints(root)
    step = first
    while True:
        with checkpoints.saving(step, {"total": step}) as folder:
            for name in range(5):
                write_part(folder, str(name), partial(_write, folder / f"{name}.bin", step))
        step += 1


def _write(file: Path, step: int) -> None:
    file.write_bytes(str(step).encode() * 2000)


def test_kills_at_any_instant_leave_a_whole_checkpoint_and_steps_never_go_back(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 0)
    reached, kill = 0, 0
    while kill < 6 or (reached == 0 and kill < 20):  # a busy machine takes longer to its first checkpoint
        delay = (0.05, 0.11, 0.07, 0.13, 0.09, 0.06)[kill % 6] * 2 ** (kill // 6)
        kill += 1
        process = FORK.Process(target=_save_for_ever, args=(tmp_path, reached + 1))
        process.start()
        time.sleep(delay)
        os.kill(process.pid or 0, 9)
        process.join()
        latest = checkpoints.latest()
        assert latest is not None and latest.step >= reached
        if latest.step:
            assert {(latest.path / f"{name}.bin").read_bytes() for name in range(5)} == {
                str(latest.step).encode() * 2000
            }
        reached = latest.step
    assert reached > 0
    _save(checkpoints, reached + 1)
    assert _steps(checkpoints) == [reached + 1], "what the kills left behind is gone"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("state.json", {"step": "2"}),
        ("state.json", {"metric": "best"}),
        ("state.json", {"state": [1]}),
        ("COMPLETE", {"sizes": ["w"]}),
        ("COMPLETE", {"sizes": {"w": "1"}}),
        ("COMPLETE", {"sha256": "none"}),
        ("COMPLETE", {"sha256": {"absent": "0"}}),
    ],
)
def test_a_checkpoint_with_values_of_other_types_is_skipped(name, changes, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_best=2)
    _save(checkpoints, 1, metric=0.5)
    _save(checkpoints, 2, metric=1.0)
    folder = max(tmp_path.iterdir())
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    if name == "state.json":  # its digest is in the marker, which a version that writes other types would write too
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "COMPLETE"}
        (folder / "COMPLETE").write_text(json.dumps({"sizes": sizes}))
    for found in (checkpoints.latest(), checkpoints.to_resume(damaged_archive), checkpoints.best()):
        assert found is not None and found.step == 1


# ---------------------------------------------------------------- parts


def test_waiting_ends_when_every_part_is_whole(tmp_path):
    go = threading.Event()

    def write(name: str) -> None:
        assert go.wait(30)
        (tmp_path / name).write_text("x")

    write_part(tmp_path / "policy", "rank_0", lambda: write("a"))
    write_part(tmp_path, "rank_0", lambda: write("b"))
    threading.Timer(0.05, go.set).start()
    for folder in (tmp_path, tmp_path / "not there"):
        wait_for_parts(folder)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "policy"], "no note is left"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("a strange tensor"), r"'policy/rank_3': could not be written \(ValueError: a strange tensor\)"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full; free space"),
    ],
)
def test_a_part_that_failed_is_named_with_the_reason(tmp_path, error, text):
    def write() -> None:
        raise error

    write_part(tmp_path / "policy", "rank_3", write)
    with pytest.raises(ArtifactError, match=text):
        wait_for_parts(tmp_path)


def test_a_writer_on_another_node_that_died_can_be_retried(tmp_path):
    def write() -> None:
        raise TrainerLostError("the worker died")

    write_part(tmp_path, "rank_3", write)
    with pytest.raises(WorkerLostError, match=r"checkpoint\.part = 'rank_3': its writer died; run again"):
        wait_for_parts(tmp_path)


def _begin_and_hang(folder: Path) -> None:
    write_part(folder, "rank_1", lambda: time.sleep(600))
    (folder / "begun").touch()
    time.sleep(600)


def test_a_writer_that_was_killed_is_noticed_at_once(tmp_path):
    process = FORK.Process(target=_begin_and_hang, args=(tmp_path,))
    process.start()
    while not (tmp_path / "begun").exists():
        time.sleep(0.005)
    with pytest.raises(ArtifactError, match=r"nothing was written for 0\.05 s"):
        wait_for_parts(tmp_path, stalled_s=0.05)
    os.kill(process.pid or 0, 9)
    process.join()
    with pytest.raises(WriterDied, match=r"checkpoint\.part = 'rank_1': its writer died; run again"):
        wait_for_parts(tmp_path)


def test_a_folder_that_was_given_up_meanwhile_harms_nobody(tmp_path):
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
