import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.store import attempts
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.checkpoints import Checkpoints, damaged_archive
from rlhf_core.store.places import mirror, unfinished
from rlhf_core.store.places.buckets import BucketObjects
from rlhf_core.store.places.unfinished import Keeper
from tests.support.buckets import Nodes, mirror_in
from tests.support.toy_stage import ToyConfig, run_toy, stage_key, toy_spec

KEY = stage_key(toy_spec(ToyConfig(steps=4)))


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "FRESH_SECONDS", 0.0)
    return Nodes(tmp_path, monkeypatch)


def _toy(store: ArtifactStore, trouble: str = "") -> Any:
    return run_toy(store, toy_spec(ToyConfig(steps=4, trouble=trouble)))


def _files(nodes: Nodes) -> set[str]:
    return {name for name, _, _ in BucketObjects(nodes.bucket).listed("work/")}


def test_another_node_resumes_from_the_newest_checkpoint(nodes, store):
    whole, _ = _toy(store)
    with pytest.raises(ValueError, match="step 3 went wrong"):
        _toy(nodes.store("ada"), "raise:3")
    ben = nodes.store("ben")
    ref, decision = _toy(ben)
    assert (decision.action, decision.step) == ("RESUME", 2) and ref == whole
    record = ben.record(KEY)
    assert record is not None and (record.attempts, record.resumed_from) == (2, 2)
    lines = attempts.metrics(ben.layout.attempt(KEY)).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4], "with what the other has recorded"
    assert _files(nodes) == set() and mirror_in(ben).unfinished.get(f"{KEY}.json") is None


def test_checkpoints_are_uploaded_while_the_stage_runs_and_the_last_one_alone_stays(nodes, monkeypatch, tmp_path):
    monkeypatch.setattr(unfinished, "LOOK_SECONDS", 0.01)
    ada, seen = nodes.store("ada"), []
    look = Keeper.look

    def counted(keeper: Keeper) -> bool:
        done = look(keeper)
        if keeper._uploaded and keeper._uploaded not in seen:
            seen.append(keeper._uploaded)
        return done

    monkeypatch.setattr(Keeper, "look", counted)
    with pytest.raises(ValueError, match="the end went wrong"):
        run_toy(ada, toy_spec(ToyConfig(steps=4, trouble="raise:end", seconds_a_step=0.1)))
    assert len(seen) >= 2 and seen[-1].startswith("step-0000000004")
    found = mirror_in(ada).unfinished.get(f"{KEY}.json")
    assert found is not None and {Path(name).parts[1] for name in found.value["files"] if name.startswith("ckpt/")} == {
        seen[-1]
    }
    assert _files(nodes) == {f"work/{KEY}/{digest}" for digest in found.value["files"].values()}
    assert not list((ada.root / "cache").glob("*.keep"))


def _attempt(store: ArtifactStore, number: int, step: int) -> Keeper:
    """Return the keeper of an attempt that has a checkpoint."""
    work = store.layout.attempt(KEY) / f"work-{number}"
    work.mkdir(parents=True, exist_ok=True)
    saved = Checkpoints(work / "ckpt")
    with saved.saving(step, {"n": number}) as folder:
        (folder / "weights").write_text(f"{number} {step}")
    saved.settle()
    return Keeper(mirror_in(store), KEY, number, work)


def test_work_of_a_later_attempt_is_never_replaced_nor_are_a_nodes_own_later_files(nodes):
    ada, ben, cyd = (nodes.store(name) for name in ("ada", "ben", "cyd"))
    late, ours = _attempt(ada, 1, 7), _attempt(ben, 2, 5)
    assert late.look() and ours.look() and late.look(), "nothing new of the first"
    assert not _attempt(ada, 1, 8).look(), "the second has left its own"
    for store, works in ((ada, {"work-1", "work-2"}), (cyd, {"work-2"})):
        unfinished.bring(mirror_in(store), KEY)
        assert {path.name for path in store.layout.attempt(KEY).glob("*")} == works
        found = Checkpoints(attempts.checkpoints(store.layout.attempt(KEY))).to_resume(damaged_archive)
        assert found is not None and (found.path / "weights").read_text() == "2 5"


def test_work_that_is_not_what_was_uploaded_is_left_alone(nodes, caplog):
    assert _attempt(nodes.store("ada"), 1, 7).look()
    for name in _files(nodes):
        nodes.bucket.client.put(name, b"{}")
    ben = nodes.store("ben")
    unfinished.bring(mirror_in(ben), KEY)
    assert "on another node, cannot be used" in caplog.text and not list(ben.layout.attempt(KEY).glob("*"))


def test_a_bucket_that_is_away_costs_the_copy_and_not_the_stage(nodes, monkeypatch, caplog):
    def away(*_: Any) -> None:
        raise OSError("no route to host")

    ada = nodes.store("ada")
    monkeypatch.setattr(unfinished.Keeper, "_upload", away)
    monkeypatch.setattr(unfinished, "LOOK_SECONDS", 0.01)
    ref, _ = run_toy(ada, toy_spec(ToyConfig(steps=4, seconds_a_step=0.05)))
    assert ada.holds(ref) and "could not upload a checkpoint" in caplog.text
