import dataclasses
import sqlite3
import stat
from pathlib import Path

import pytest

from campaigns.durability.checks import (
    Repeat,
    StageResult,
    differences,
    leftovers,
    problems,
    repeats,
    results,
    saw_teeth,
    tracking_problems,
)
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import name_of, ourselves
from rlhf_core.store.protocol import update
from tests.support.toy_stage import NoEngines, RecordingTracker, toy_spec


def make(home: Path, *, seed: int = 7) -> dict[str, StageResult]:
    """Run the toy stage on the store of `home`; return what it gave."""
    spec = toy_spec(seed=seed)
    execute(
        ArtifactStore(home / "store"), spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None
    )
    return results(home)


def test_a_run_like_its_twin_has_no_problems_and_leaves_nothing(tmp_path):
    twin = make(tmp_path / "twin")
    make(tmp_path / "run")
    assert problems(tmp_path / "run", twin) == []
    assert leftovers(tmp_path / "run") == []
    assert twin["toy"].attempts == 1
    assert [point[:2] for point in twin["toy"].points] == [("toy/train/total", step) for step in (1, 2, 3)]


def test_another_digest_is_a_problem(tmp_path):
    twin = make(tmp_path / "twin", seed=8)
    make(tmp_path / "run", seed=7)
    assert any(line.startswith("toy: digest ") for line in problems(tmp_path / "run", twin))


def test_a_stage_that_is_missing_or_too_many_is_a_problem(tmp_path):
    twin = make(tmp_path / "twin")
    assert list(differences({}, twin)) == ["toy: missing"]
    assert list(differences(twin, {})) == ["toy: not in the twin"]


def test_a_value_that_differs_in_its_last_bit_is_a_problem(tmp_path):
    twin = make(tmp_path / "twin")["toy"]
    (name, step, value), *rest = twin.points
    other = dataclasses.replace(twin, points=[(name, step, value + 1e-14), *rest])
    assert list(differences({"toy": other}, {"toy": twin})) == [
        "toy: metrics.jsonl differs from the twin's in 2 points, first ('toy/train/total', 1, '7.05')"
    ]


def test_a_flipped_byte_is_a_problem(tmp_path):
    twin = make(tmp_path / "run")
    (file,) = (tmp_path / "run" / "store" / "objects").glob("*/*/total.txt")
    file.chmod(stat.S_IRUSR | stat.S_IWUSR)
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    assert [line.partition(": ")[2] for line in problems(tmp_path / "run", twin)] == ["total.txt has other content"]


@pytest.mark.parametrize(
    "name",
    [
        "attempts/abc/out-2",
        "attempts/abc/work-1/ckpt",
        "attempts/abc/work-1/shards",
        "attempts/abc/shards",
        "tables/keys/.abc.json.01234567-1-abcdef",
        "trash/abc.def",
        "attempts/abc/work-1/ckpt/.saving-0000000004-0a1b2c3d",
        "attempts/abc/state-00000.99.tmp",
    ],
)
def test_what_should_be_gone_is_named(tmp_path, name):
    make(tmp_path)
    path = tmp_path / "store" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    assert name in leftovers(tmp_path)


def test_a_lease_and_an_object_that_was_set_aside_are_named(tmp_path):
    key = make(tmp_path)["toy"].key
    store = ArtifactStore(tmp_path / "store")
    store.shared.set_aside(store.record(key).handle.digest)
    update(store.shared, name_of(key), lambda value: value | {"lease": dataclasses.asdict(ourselves())})
    lease, aside = leftovers(tmp_path)
    assert aside.startswith("quarantine/") and lease == name_of(key)


def test_a_curve_that_goes_back_is_named():
    points = [("loss", 1, 3.0), ("eval", 1, 2.0), ("loss", 2, 1.0), ("loss", 2, 1.0)]
    assert list(saw_teeth("sft", points)) == ["sft: loss goes from step 2 to 2"]
    assert list(saw_teeth("sft", points[:3])) == []


def progress(pid: int, *done: int) -> list[dict[str, object]]:
    return [{"event": "progress", "label": "sft", "pid": pid, "done": step} for step in done]


def test_repeated_steps_are_those_that_two_processes_finished():
    # killed after 5 with a checkpoint of 4: step 5 again; then after 8 with a checkpoint of 8: nothing again
    events = [*progress(1, 1, 2, 3, 4, 5), *progress(2, 5, 6, 7, 8), *progress(3, 9)]
    assert repeats(events, {"sft": 2}) == [Repeat("sft", 1, 2), Repeat("sft", 0, 2)]


def test_runs_and_points_of_mlflow_are_checked(tmp_path):
    found = make(tmp_path / "home")
    key, points = found["toy"].key, [(step, "toy/train/total") for step in (1, 2, 3)]
    assert tracked(tmp_path / "a.db", found, key, "FINISHED", points) == []
    # Seconds are no result: metrics.jsonl of two runs has others, and so they are left out on both sides.
    assert tracked(tmp_path / "t.db", found, key, "FINISHED", [*points, (1, "toy/time/train")]) == []
    assert tracked(tmp_path / "x.db", found, key, "FINISHED", [*points, (1, "toy/extra")]) == [
        "MLflow: toy: points that metrics.jsonl has not, first ('toy/extra', 1)"
    ]
    assert tracked(tmp_path / "b.db", found, key, "RUNNING", points) == ["MLflow: run toy is left RUNNING"]
    assert tracked(tmp_path / "c.db", found, "other", "FINISHED", points) == ["MLflow: toy has 0 runs, not 1"]
    assert tracked(tmp_path / "d.db", found, key, "FINISHED", [*points, points[0]]) == [
        "MLflow: toy: 1 points are there twice, first ('toy/train/total', 1)"
    ]
    assert tracked(tmp_path / "e.db", found, key, "FINISHED", points[1:]) == [
        "MLflow: toy: 1 of 3 points are missing, first ('toy/train/total', 1)"
    ]


def test_a_policy_that_was_published_more_often_than_there_are_results_is_a_problem(tmp_path):
    found = make(tmp_path / "home")
    file = tmp_path / "home" / "mlflow.db"
    tracked(file, found, found["toy"].key, "FINISHED", [(step, "toy/train/total") for step in (1, 2, 3)])
    with sqlite3.connect(file) as connection:
        connection.executemany("INSERT INTO model_versions VALUES (?)", [("policy",), ("policy",)])
    assert list(tracking_problems(file, found)) == ["MLflow: policy has 2 versions, not 1"]
    assert list(tracking_problems(file, found, published=2)) == []
    assert problems(tmp_path / "home", found) != []
    assert problems(tmp_path / "home", found, tracked=False) == []


def tracked(
    path: Path, found: dict[str, StageResult], key: str, status: str, points: list[tuple[int, str]]
) -> list[str]:
    """Return what is said of a database with one run; its tables have the columns of MLflow's that are read."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (run_uuid, name, status)")
        connection.execute("CREATE TABLE tags (key, value, run_uuid)")
        connection.execute("CREATE TABLE metrics (key, step, run_uuid)")
        connection.execute("CREATE TABLE model_versions (name)")
        connection.execute("INSERT INTO runs VALUES ('r', 'toy', ?)", [status])
        connection.execute("INSERT INTO tags VALUES ('store.key', ?, 'r')", [key])
        connection.executemany("INSERT INTO metrics VALUES (?, ?, 'r')", [(name, step) for step, name in points])
    return list(tracking_problems(path, found))
