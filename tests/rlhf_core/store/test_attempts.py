import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.checkpoints import Checkpoints, damaged_archive
from rlhf_core.stage.run import find_hit
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.attempts import AttemptFolder
from rlhf_core.store.layout import remove_tree, sweep_temporaries, write_json
from rlhf_core.store.leases import Lease, name_of, ourselves, owner_in
from rlhf_core.store.protocol import update
from tests.support.toy_stage import run_toy, toy_spec


@pytest.fixture
def folder(store) -> Iterator[AttemptFolder]:
    """The attempts at a key whose lease this process holds."""
    with store.lease("k") as lease:
        yield store.attempts("k", lease)


def begin(folder: AttemptFolder, resumed_from: int | None = None) -> attempts.Attempt:
    return attempts.begin(folder, label="sft", resumed_from=resumed_from, code={"m": "1"})


def test_attempts_are_counted_and_keep_how_they_ended(folder):
    first = begin(folder)
    assert attempts.output(folder, first) == folder.path / "out-1" and (folder.path / "out-1").is_dir()
    attempts.end(folder, first, label="sft", status="failed", failure="ValueError: no", seconds=1.23456)
    second = begin(folder, resumed_from=40)
    past = attempts.history(folder)
    assert [(item.number, item.status, item.failure, item.seconds, item.resumed_from) for item in past] == [
        (1, "failed", "ValueError: no", 1.235, None),
        (2, "running", "", 0.0, 40),
    ]
    assert second.number == 2 and not (folder.path / "out-1").exists()


def test_the_output_of_an_attempt_is_removed_by_the_next_and_not_moved_meanwhile(folder, monkeypatch):
    begin(folder)
    (folder.path / "out-1" / "half").write_text("x")

    def removed_while_the_first_commits(path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            (folder.path / "out-1").rename(folder.path / "object")
        remove_tree(path)

    monkeypatch.setattr(attempts, "remove_tree", removed_while_the_first_commits)
    begin(folder)
    assert sorted(path.name for path in folder.path.iterdir()) == ["out-2", "work-2"]


def test_an_attempt_goes_on_in_a_folder_of_its_own_which_the_one_before_cannot_touch(folder):
    first = begin(folder)
    stale = Checkpoints(attempts.checkpoints(folder))
    with stale.saving(1, {"n": 1}) as path:
        (path / "weights").write_text("1")
    stale.settle()
    begin(folder, resumed_from=1)
    mine = Checkpoints(attempts.checkpoints(folder))
    found = mine.to_resume(damaged_archive)
    assert found is not None and (found.step, (found.path / "weights").read_text()) == (1, "1")
    with mine.saving(2, {"n": 2}) as path:
        with pytest.raises(FileNotFoundError), stale.saving(2, {"n": -2}):
            raise AssertionError("there is nowhere to save to")
        (path / "weights").write_text("2")
    mine.settle()
    latest = mine.to_resume(damaged_archive)
    assert latest is not None and (latest.step, latest.state, stale.latest()) == (2, {"n": 2}, None)
    assert not attempts.work(folder, first).exists()


def test_work_is_found_wherever_a_kill_stopped_its_move(folder):
    begin(folder)
    (folder.path / "work-1" / "shard-1").write_text("x")
    begin(folder)
    for left in ("work-1", "work-3"):  # noted and not moved yet; moved and not noted yet
        attempts.latest_work(folder).rename(folder.path / left)
        assert attempts.unfinished_work(folder) == ["shard-1"]
    (folder.path / "work-3").rename(folder.path / "work-2")
    assert begin(folder).number == 3
    assert (folder.path / "work-3" / "shard-1").exists() and not (folder.path / "work-1").exists()
    (folder.path / "work-1" / "ckpt").mkdir(parents=True)  # of one that was taken over
    assert attempts.unfinished_work(folder) == ["shard-1"] and begin(folder)
    folder.lease.update(lambda value: value | {"attempts": []})  # lost: counted from the folders
    assert begin(folder).number == 5
    attempts.clear(folder, keep_metrics=True)
    assert sorted(path.name for path in folder.path.iterdir()) == ["work-5"]


def test_unfinished_work_is_what_the_stage_left_itself(folder):
    assert attempts.unfinished_work(folder) == []
    begin(folder)
    attempts.checkpoints(folder).mkdir()
    left = attempts.latest_work(folder)
    for name in ("metrics.jsonl", "worker.log", "shard-00001.parquet"):
        (left / name).write_text("x")
    assert attempts.unfinished_work(folder) == ["shard-00001.parquet"]
    attempts.clear(folder, keep_metrics=True)
    assert sorted(path.name for path in left.iterdir()) == ["metrics.jsonl", "worker.log"]
    assert attempts.metrics(folder) == left / "metrics.jsonl"
    attempts.clear(folder, keep_metrics=False)
    assert sorted(path.name for path in left.iterdir()) == ["worker.log"]
    assert sorted(path.name for path in folder.path.iterdir()) == ["work-1"]


def test_an_attempt_whose_process_was_killed_is_noted_as_interrupted_once(folder):
    assert attempts.abandon(folder, committed=False) is None
    killed = begin(folder)
    found = attempts.abandon(folder, committed=False)
    assert found is not None and found[0] == "sft" and found[1].number == 1
    (noted,) = attempts.history(folder)
    assert (
        noted.status == "interrupted"
        and noted.failure == f"process {killed.pid} on {killed.host} ended without reporting a result"
    )
    assert not (folder.path / "out-1").exists() and attempts.abandon(folder, committed=False) is None


@pytest.mark.parametrize("changes", [{"number": "two"}, {"code": ["m"]}, {"status": "lost"}, {"failure": 5}])
def test_a_history_with_values_of_other_types_starts_again(changes, folder):
    begin(folder)
    folder.lease.update(lambda value: value | {"attempts": [value["attempts"][0] | changes]})
    assert attempts.history(folder) == []
    assert attempts.abandon(folder, committed=False) is None
    assert begin(folder).number == 2


def test_what_a_taken_over_attempt_clears_is_nothing_of_its_successor(folder):
    first = begin(folder)
    second = begin(folder)
    (attempts.work(folder, second) / "shard-1").write_text("x")
    attempts.clear(folder, keep_metrics=True, until=first)
    attempts.give_way(folder, second)  # nobody came after it
    assert attempts.unfinished_work(folder) == ["shard-1"] and attempts.output(folder, second).exists()
    (attempts.work(folder, first) / "ckpt").mkdir(parents=True)  # it wrote on, where it had been
    attempts.give_way(folder, first)
    assert sorted(path.name for path in folder.path.iterdir()) == ["out-2", "work-2"]


def test_the_work_that_a_later_attempt_is_about_to_move_is_left_to_it(folder, monkeypatch):
    first, write = begin(folder), attempts._write
    (attempts.work(folder, first) / "shard-1").write_text("x")

    def write_while_the_first_ends(*arguments: Any) -> None:
        write(*arguments)
        attempts.give_way(folder, first)

    monkeypatch.setattr(attempts, "_write", write_while_the_first_ends)
    begin(folder)
    assert attempts.unfinished_work(folder) == ["shard-1"]


# ---------------------------------------------------------------- after a kill


def as_a_kill_leaves_it(store: ArtifactStore, key: str, **changes: object) -> AttemptFolder:
    """Put back what a process has around it between its record and the end of its attempt."""
    folder = store.attempts(key)
    killed = {"status": "running"} | changes
    dead = asdict(ourselves()) | {"pid_started": 1}  # another process had this number once
    update(
        store.shared,
        name_of(key),
        lambda value: value | {"lease": dead, "attempts": [*value["attempts"][:-1], value["attempts"][-1] | killed]},
    )
    (attempts.checkpoints(folder) / "step-1").mkdir(parents=True)
    (attempts.latest_work(folder) / "shards").mkdir()
    return folder


def is_leased(store: ArtifactStore, key: str) -> bool:
    found = store.shared.read(name_of(key))
    return found is not None and owner_in(found.value) is not None


def test_a_hit_tidies_up_after_a_process_that_was_killed_right_behind_its_record(store):
    ref, decision = run_toy(store)
    key = decision.key
    folder = as_a_kill_leaves_it(store, key)
    found = find_hit(store, toy_spec())
    assert found is not None and found[0].handle == ref
    assert [item.status for item in attempts.history(folder)] == ["committed"]
    assert not attempts.checkpoints(folder).exists() and attempts.unfinished_work(folder) == []
    assert not is_leased(store, key)
    assert attempts.metrics(folder).exists()


def test_a_forced_attempt_that_did_not_come_to_its_own_record_was_interrupted(store):
    key = run_toy(store)[1].key
    folder = as_a_kill_leaves_it(store, key, number=2, forced=True)
    ended = store.tidy(key)
    assert ended is not None and ended[1].status == "interrupted"
    assert store.record(key) is not None and attempts.unfinished_work(folder) == []


def test_what_an_attempt_without_a_record_can_go_on_from_stays(store):
    key = run_toy(store)[1].key
    folder = as_a_kill_leaves_it(store, key)
    update(store.shared, name_of(key), lambda value: {n: one for n, one in value.items() if n != "record"})
    ended = store.tidy(key)
    assert ended is not None and ended[1].status == "interrupted"
    assert attempts.checkpoints(folder).exists() and attempts.unfinished_work(folder) == ["shards"]
    assert store.tidy(key) is None


def test_nothing_is_touched_while_somebody_computes_the_key(store):
    key = run_toy(store)[1].key
    folder = as_a_kill_leaves_it(store, key)
    with store.lease(key):
        assert store.tidy(key) is None
    assert attempts.history(folder)[-1].status == "running"


def test_files_that_a_killed_writer_left_are_swept_and_those_of_a_living_one_are_not(tmp_path):
    program = """
import os, sys
from pathlib import Path
from rlhf_core.store.layout import write_json
os.replace = lambda *_: os._exit(9)
write_json(Path(sys.argv[1]), {"a": 1})
"""
    target = tmp_path / "keys" / "ab" / "record.json"
    target.parent.mkdir(parents=True)
    assert subprocess.run([sys.executable, "-c", program, str(target)]).returncode == 9
    (left,) = target.parent.iterdir()
    mine = left.with_name(left.name.replace(left.name.split("-")[1], str(os.getpid())))
    mine.write_text("{}")
    write_json(target, {"a": 2})
    assert sweep_temporaries(tmp_path) == [left]
    assert sorted(path.name for path in target.parent.iterdir()) == sorted([mine.name, target.name])


def test_who_loses_the_lease_while_it_tidies_up_touches_nothing(store, monkeypatch):
    key = run_toy(store)[1].key
    folder = as_a_kill_leaves_it(store, key)
    look = ArtifactStore.record

    def look_too_long(store: ArtifactStore, key: str, lease: Lease | None = None) -> object:
        thief = {"token": "thief"}
        update(store.shared, name_of(key), lambda value: value | {"lease": value["lease"] | thief})
        return look(store, key, lease)

    monkeypatch.setattr(ArtifactStore, "record", look_too_long)
    with pytest.raises(ArtifactError, match="took the lease over"):
        store.tidy(key)
    assert attempts.history(folder)[-1].status == "running" and attempts.checkpoints(folder).exists()
