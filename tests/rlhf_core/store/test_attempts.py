from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.store import attempts
from rlhf_core.store.checkpoints import Checkpoints


def test_attempts_are_counted_and_keep_how_they_ended(tmp_path: Path) -> None:
    first = attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"})
    assert attempts.output(tmp_path, first) == tmp_path / "out-1" and (tmp_path / "out-1").is_dir()
    attempts.end(tmp_path, first, label="sft", status="failed", failure="ValueError: no", seconds=1.23456)
    second = attempts.begin(tmp_path, label="sft", resumed_from=40, code={})
    past = attempts.history(tmp_path)
    assert [(item.number, item.status, item.failure, item.seconds, item.resumed_from) for item in past] == [
        (1, "failed", "ValueError: no", 1.235, None),
        (2, "running", "", 0.0, 40),
    ]
    assert second.number == 2 and not (tmp_path / "out-1").exists()


def test_the_output_of_a_killed_attempt_is_removed_by_the_next(tmp_path: Path) -> None:
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"})
    (tmp_path / "out-1" / "half").write_text("x")
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt.json", "out-2", "work-2"]


def test_an_attempt_goes_on_in_a_folder_of_its_own_which_the_one_before_cannot_touch(tmp_path: Path) -> None:
    first = attempts.begin(tmp_path, label="sft", resumed_from=None, code={})
    stale = Checkpoints(attempts.checkpoints(tmp_path))
    with stale.saving(1, {"n": 1}) as folder:
        (folder / "weights").write_text("1")
    stale.settle()
    attempts.begin(tmp_path, label="sft", resumed_from=1, code={})
    mine = Checkpoints(attempts.checkpoints(tmp_path))
    found = mine.to_resume()
    assert found is not None and (found.step, (found.path / "weights").read_text()) == (1, "1")
    with mine.saving(2, {"n": 2}) as folder:
        with pytest.raises(FileNotFoundError), stale.saving(2, {"n": -2}):
            raise AssertionError("there is nowhere to save to")
        (folder / "weights").write_text("2")
    mine.settle()
    latest = mine.to_resume()
    assert latest is not None and (latest.step, latest.state, stale.latest()) == (2, {"n": 2}, None)
    assert not attempts.work(tmp_path, first).exists()


def test_work_is_found_wherever_a_kill_stopped_its_move(tmp_path: Path) -> None:
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={})
    (tmp_path / "work-1" / "shard-1").write_text("x")
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={})
    (tmp_path / "work-2").rename(tmp_path / "work-1")  # noted, and not moved yet
    assert attempts.unfinished_work(tmp_path) == ["shard-1"]
    assert attempts.begin(tmp_path, label="sft", resumed_from=None, code={}).number == 3
    assert (tmp_path / "work-3" / "shard-1").exists() and not (tmp_path / "work-1").exists()
    (tmp_path / "work-1" / "ckpt").mkdir(parents=True)  # of one that was taken over
    assert attempts.unfinished_work(tmp_path) == ["shard-1"] and attempts.begin(
        tmp_path, label="sft", resumed_from=None, code={}
    )
    (tmp_path / "attempt.json").unlink()  # damaged: counted from the folders
    assert attempts.begin(tmp_path, label="sft", resumed_from=None, code={}).number == 5
    attempts.clear(tmp_path, keep_metrics=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt.json", "work-5"]


def test_unfinished_work_is_what_the_stage_left_itself(tmp_path: Path) -> None:
    assert attempts.unfinished_work(tmp_path / "nowhere") == []
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"})
    attempts.checkpoints(tmp_path).mkdir()
    left = attempts.latest_work(tmp_path)
    for name in ("metrics.jsonl", "worker.log", "shard-00001.parquet"):
        (left / name).write_text("x")
    assert attempts.unfinished_work(tmp_path) == ["shard-00001.parquet"]
    attempts.clear(tmp_path, keep_metrics=True)
    assert sorted(path.name for path in left.iterdir()) == ["metrics.jsonl", "worker.log"]
    assert attempts.metrics(tmp_path) == left / "metrics.jsonl"
    attempts.clear(tmp_path, keep_metrics=False)
    assert sorted(path.name for path in left.iterdir()) == ["worker.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt.json", "work-1"]


def test_an_unreadable_history_starts_again(tmp_path: Path) -> None:
    (tmp_path / "attempt.json").write_text('{"attempts": [{"x": 1}]}')
    assert attempts.history(tmp_path) == []
    assert attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"}).number == 1


def test_an_attempt_whose_process_was_killed_is_noted_as_interrupted_once(tmp_path: Path) -> None:
    assert attempts.abandon(tmp_path, committed=False) is None
    killed = attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"})
    found = attempts.abandon(tmp_path, committed=False)
    assert found is not None and found[0] == "sft" and found[1].number == 1
    (noted,) = attempts.history(tmp_path)
    assert (
        noted.status == "interrupted"
        and noted.failure == f"process {killed.pid} on {killed.host} ended without reporting a result"
    )
    assert not (tmp_path / "out-1").exists() and attempts.abandon(tmp_path, committed=False) is None


@pytest.mark.parametrize(
    "changes", [{"number": "two"}, {"number": 10**400}, {"code": ["m"]}, {"status": "lost"}, {"failure": 5}]
)
def test_a_history_with_values_of_other_types_starts_again(changes: dict[str, object], tmp_path: Path) -> None:
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"})
    table = json.loads((tmp_path / "attempt.json").read_text())
    for damaged in (table | {"attempts": [table["attempts"][0] | changes]}, table | {"label": None}):
        (tmp_path / "attempt.json").write_text(json.dumps(damaged))
        assert attempts.history(tmp_path) == []
        assert attempts.abandon(tmp_path, committed=False) is None
    assert attempts.begin(tmp_path, label="sft", resumed_from=None, code={"m": "1"}).number == 2


def test_an_attempt_that_was_moved_and_not_yet_noted_is_gone_on_from(tmp_path: Path) -> None:
    attempts.begin(tmp_path, label="sft", resumed_from=None, code={})
    (tmp_path / "work-1" / "shard-1").write_text("x")
    (tmp_path / "work-1").rename(tmp_path / "work-2")  # killed here
    assert attempts.unfinished_work(tmp_path) == ["shard-1"]
    assert attempts.begin(tmp_path, label="sft", resumed_from=None, code={}).number == 3
    assert (tmp_path / "work-3" / "shard-1").exists()


def test_what_a_taken_over_attempt_clears_is_nothing_of_its_successor(tmp_path: Path) -> None:
    first = attempts.begin(tmp_path, label="sft", resumed_from=None, code={})
    second = attempts.begin(tmp_path, label="sft", resumed_from=None, code={})
    (attempts.work(tmp_path, second) / "shard-1").write_text("x")
    attempts.clear(tmp_path, keep_metrics=True, until=first)
    attempts.give_way(tmp_path, second)  # nobody came after it
    assert attempts.unfinished_work(tmp_path) == ["shard-1"] and attempts.output(tmp_path, second).exists()
    (attempts.work(tmp_path, first) / "ckpt").mkdir(parents=True)  # it wrote on, where it had been
    attempts.give_way(tmp_path, first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["attempt.json", "out-2", "work-2"]
