from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from rlhf_core.checkpoints import Checkpoints
from rlhf_core.errors import ArtifactError, ConfigError

FORK = multiprocessing.get_context("fork")


def _save(checkpoints: Checkpoints, step: int, *, metric: float | None = None) -> None:
    with checkpoints.saving(step, {"total": step * 10}, metric=metric) as folder:
        (folder / "w").write_text(str(step))


def _steps(checkpoints: Checkpoints) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in checkpoints.root.iterdir())


def test_the_newest_checkpoint_comes_back_with_state_and_files(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "ckpt")
    assert checkpoints.latest() is None and checkpoints.best() is None
    _save(checkpoints, 9)
    _save(checkpoints, 10)
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.state, (latest.path / "w").read_text()) == (10, {"total": 100}, "10")
    assert _steps(checkpoints) == [10]


def test_the_old_checkpoint_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    with checkpoints.saving(2, {}) as folder:
        latest = checkpoints.latest()
        assert latest is not None and latest.step == 1
        assert folder.is_dir() and not list(folder.iterdir())
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 2
    assert _steps(checkpoints) == [2]


def test_an_error_while_saving_leaves_the_old_checkpoint_and_no_litter(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    with pytest.raises(ValueError, match="no"), checkpoints.saving(2, {}):
        raise ValueError("no")
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["step"]
    assert _steps(checkpoints) == [1]


def test_a_full_disk_while_saving_is_named_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 1)
    full = pytest.raises(ArtifactError, match=r"the disk is full; free space, or .*the same command resumes")
    with full, checkpoints.saving(2, {}):
        Path("/dev/full").write_text("x")
    assert _steps(checkpoints) == [1]


@pytest.mark.parametrize("harm", ["no marker", "short file", "missing file", "bad state"])
def test_a_torn_checkpoint_is_skipped_with_a_warning(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    _save(checkpoints, 1)
    _save(checkpoints, 2)
    torn = max(tmp_path.iterdir())
    if harm == "no marker":
        (torn / "COMPLETE").unlink()
    elif harm == "short file":
        (torn / "w").write_text("")
    elif harm == "missing file":
        (torn / "w").unlink()
    else:
        (torn / "state.json").write_text("?" * (torn / "state.json").stat().st_size)
    with caplog.at_level(logging.WARNING):
        latest = checkpoints.latest()
    assert latest is not None and latest.step == 1
    assert str(torn) in caplog.text
    _save(checkpoints, 3)
    assert _steps(checkpoints) == [1, 3], "the torn one is removed once a newer one is whole"


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 5)
    with checkpoints.saving(5, {"total": -1}):
        pass
    latest = checkpoints.latest()
    assert latest is not None and latest.state == {"total": -1}
    assert _steps(checkpoints) == [5]


def test_the_best_by_metric_stay_beside_the_last(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for step, metric in [(1, 0.3), (2, 0.9), (3, float("nan")), (4, 0.5), (5, None), (6, 0.1)]:
        _save(checkpoints, step, metric=metric)
    assert _steps(checkpoints) == [2, 5, 6]
    best = checkpoints.best()
    assert best is not None and (best.step, best.metric) == (2, 0.9)


def test_of_equal_metrics_the_newest_is_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        _save(checkpoints, step, metric=0.0 if step == 3 else 1.0)
    best = checkpoints.best()
    assert best is not None and best.step == 2


def test_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"checkpoint\.state"), Checkpoints(tmp_path).saving(1, {"x": object()}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_at_least_the_newest_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last = 0"):
        Checkpoints(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match="keep_best = -1"):
        Checkpoints(tmp_path, keep_best=-1)


def _save_for_ever(root: Path, first: int) -> None:
    checkpoints = Checkpoints(root)
    step = first
    while True:
        with checkpoints.saving(step, {"total": step}) as folder:
            for name in range(5):
                (folder / f"{name}.bin").write_bytes(str(step).encode() * 2000)
        step += 1


def test_kills_at_any_instant_leave_a_whole_checkpoint_and_steps_never_go_back(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 0)
    reached = 0
    for delay in (0.05, 0.11, 0.07, 0.13, 0.09, 0.06):
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
