import os
import random
import time
from functools import partial
from pathlib import Path

import pytest

from campaigns.durability import instants, processes
from campaigns.durability.instants import AtOperation, AtTime, Census, InCall, InStage, Instant, draw, obey, purpose

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="paths of open files are read from /proc")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("store/tables/keys/.abc.json.0123", "table of a key"),
        ("store/locks/.lock", "locks"),
        ("store/objects/ab/abc/manifest.json", "commit: object"),
        ("store/attempts/abc/out-1/model.safetensors", "artifact"),
        ("store/attempts/abc/work-1", "work folder: taken over"),
        ("store/attempts/abc/work-1/ckpt/.saving-4/state.json", "checkpoint"),
        ("store/attempts/abc/work-1/ckpt/step-4/state.json", "checkpoint: rename and evict"),
        ("store/attempts/abc/work-1/metrics.jsonl", "metrics"),
        ("store/attempts/abc/work-1/shards/shard-0.parquet", "shards"),
        ("store/tables/labels/abc.json", "labels and pins"),
        ("mlartifacts/.spool/abc.jsonl", "tracking"),
        ("output.log", "logs"),
    ],
)
def test_a_file_is_known_by_its_place(path, expected):
    assert purpose(path) == expected


def change_files(home: Path, instant: Instant | None) -> None:
    """Write a table, replace it, remove it: four changes, and an unrelated one after the second."""
    obey(instant, home, lambda: "sft", lambda what: os.write(1, f"{what}\n".encode()) and None)
    folder = home / "store" / "tables" / "keys"
    (folder / ".new").write_text("1")
    (folder / ".new").replace(folder / "a.json")
    (home / "elsewhere.txt").write_text("x")
    descriptor = os.open(folder / "a.json", os.O_RDONLY)
    os.fsync(descriptor)
    (folder / "a.json").unlink()


@pytest.mark.parametrize(
    ("number", "left"), [(1, []), (2, [".new"]), (3, ["a.json", "elsewhere.txt"]), (4, ["a.json", "elsewhere.txt"])]
)
def test_a_process_dies_before_the_change_that_it_was_told(tmp_path, number, left):
    (tmp_path / "store" / "tables" / "keys").mkdir(parents=True)
    log = tmp_path / "output.log"
    ended = processes.run(partial(change_files, tmp_path, AtOperation("table of a key", number)), log)
    assert ended.how == "killed" and log.read_text() == "table of a key\n"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and path != log) == left


@pytest.mark.parametrize(("label", "how"), [("sft", "killed"), ("ppo", "completed")])
def test_a_process_dies_only_in_the_stage_that_it_was_told(tmp_path, label, how):
    (tmp_path / "store" / "tables" / "keys").mkdir(parents=True)
    work = partial(change_files, tmp_path, InStage(label, 2))
    assert processes.run(work, tmp_path / "output.log").how == how


def test_a_process_lives_if_it_changes_fewer_files(tmp_path):
    (tmp_path / "store" / "tables" / "keys").mkdir(parents=True)
    work = partial(change_files, tmp_path, AtOperation("table of a key", 5))
    assert processes.run(work, tmp_path / "output.log").how == "completed"


class Slow:
    def work(self) -> None:
        time.sleep(5.0)


def call_twice() -> None:
    instants.CALLS = {"working": (__name__, "Slow", "work")}
    obey(InCall("working", 1, 0.05), Path("/"), lambda: "sft", lambda what: os.write(1, what.encode()) and None)
    Slow().work()


def test_a_process_dies_inside_the_call_that_it_was_told(tmp_path):
    ended = processes.run(call_twice, tmp_path / "output.log")
    assert ended.how == "killed" and ended.seconds < 5.0
    assert (tmp_path / "output.log").read_text() == "working"


def test_instants_are_drawn_within_reach_and_of_every_kind():
    stages = {"": 5, "sft": 20, "ppo": 25}
    census = Census({"table of a key": 10, "metrics": 40}, stages, calls={"sampling": [0.1] * 8}, seconds=20.0)
    drawn = [draw(random.Random(seed), census, reach=0.5, done={"sft"}) for seed in range(200)]
    assert {type(one) for one in drawn} == {AtTime, AtOperation, InCall, InStage}
    assert {one.label for one in drawn if isinstance(one, InStage)} == {"ppo"}
    assert max(one.seconds for one in drawn if isinstance(one, AtTime)) <= 10.0
    tables = {one.number for one in drawn if isinstance(one, AtOperation) and one.purpose == "table of a key"}
    assert tables == {1, 2, 3, 4, 5}
    again = draw(random.Random(7), census, reach=0.5, done={"sft"})
    assert again == drawn[7]
