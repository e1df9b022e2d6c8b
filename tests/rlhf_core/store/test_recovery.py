from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.errors import ArtifactError
from rlhf_core.stage.run import execute, find
from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.layout import sweep_temporaries, write_json
from rlhf_core.store.leases import lease_file
from rlhf_core.types import ArtifactRef
from tests.support.toy_stage import NoEngines, RecordingTracker, toy_spec


def run(store: ArtifactStore, *, force: bool = False) -> tuple[ArtifactRef, str]:
    ref, decision = execute(
        store, toy_spec(), runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None, force=force
    )
    return ref, decision.key


def as_a_kill_leaves_it(store: ArtifactStore, key: str, **changes: object) -> Path:
    """Put back what a process has around it between its record and the end of its attempt."""
    folder = store.layout.attempt(key)
    table = json.loads((folder / attempts.HISTORY).read_text())
    table["attempts"][-1] |= {"status": "running"} | changes
    write_json(folder / attempts.HISTORY, table)
    (attempts.checkpoints(folder) / "step-1").mkdir(parents=True)
    (attempts.latest_work(folder) / "shards").mkdir()
    with store.lease(key) as lease:
        held = lease_file(store.layout.leases, key).read_text()
    dead = json.loads(held) | {"pid_started": 1}  # another process had this number once
    assert lease.owner.pid == dead["pid"] == os.getpid()
    lease_file(store.layout.leases, key).write_text(json.dumps(dead))
    return folder


def test_a_hit_tidies_up_after_a_process_that_was_killed_right_behind_its_record(store: ArtifactStore) -> None:
    ref, key = run(store)
    folder = as_a_kill_leaves_it(store, key)
    found = find(store, toy_spec())
    assert found is not None and found[0].handle == ref
    assert [item.status for item in attempts.history(folder)] == ["committed"]
    assert not attempts.checkpoints(folder).exists() and attempts.unfinished_work(folder) == []
    assert not lease_file(store.layout.leases, key).exists()
    assert attempts.metrics(folder).exists()


def test_a_forced_attempt_that_did_not_come_to_its_own_record_was_interrupted(store: ArtifactStore) -> None:
    _, key = run(store)
    folder = as_a_kill_leaves_it(store, key, number=2, forced=True)
    ended = store.tidy(key)
    assert ended is not None and ended[1].status == "interrupted"
    assert store.record(key) is not None and attempts.unfinished_work(folder) == []


def test_what_an_attempt_without_a_record_can_go_on_from_stays(store: ArtifactStore) -> None:
    _, key = run(store)
    folder = as_a_kill_leaves_it(store, key)
    store.layout.key(key).unlink()
    ended = store.tidy(key)
    assert ended is not None and ended[1].status == "interrupted"
    assert attempts.checkpoints(folder).exists() and attempts.unfinished_work(folder) == ["shards"]
    assert store.tidy(key) is None


def test_nothing_is_touched_while_somebody_computes_the_key(store: ArtifactStore) -> None:
    _, key = run(store)
    folder = as_a_kill_leaves_it(store, key)
    lease_file(store.layout.leases, key).unlink()
    with store.lease(key):
        assert store.tidy(key) is None
    assert attempts.history(folder)[-1].status == "running"


def test_files_that_a_killed_writer_left_are_swept_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
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


def test_who_loses_the_lease_while_it_tidies_up_touches_nothing(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = run(store)
    folder = as_a_kill_leaves_it(store, key)
    look = ArtifactStore.record

    def look_too_long(store: ArtifactStore, key: str) -> object:
        lease = lease_file(store.layout.leases, key)
        lease.write_text(json.dumps(json.loads(lease.read_text()) | {"token": "thief"}))
        return look(store, key)

    monkeypatch.setattr(ArtifactStore, "record", look_too_long)
    with pytest.raises(ArtifactError, match="took the lease over"):
        store.tidy(key)
    assert attempts.history(folder)[-1].status == "running" and attempts.checkpoints(folder).exists()
