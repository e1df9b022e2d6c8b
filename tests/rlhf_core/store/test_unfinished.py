"""Another node resumes from the newest checkpoint that a node has left in a bucket."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.store import attempts, unfinished
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.bucket_server import ObstoreServer
from rlhf_core.store.leases import Lease, name_of
from rlhf_core.store.protocol import Unreachable
from tests.support.buckets import Nodes
from tests.support.toy_stage import ToyConfig, run_toy, stage_key, toy_spec

KEY = stage_key(toy_spec(ToyConfig(steps=4)))


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    return Nodes(tmp_path, monkeypatch)


def _toy(store: ArtifactStore, trouble: str = "", seconds_a_step: float = 0.0) -> Any:
    return run_toy(store, toy_spec(ToyConfig(steps=4, trouble=trouble, seconds_a_step=seconds_a_step)))


def _files(nodes: Nodes) -> list[str]:
    return nodes.client.names("v2/work/")


def test_another_node_resumes_from_the_newest_checkpoint(nodes, store):
    whole, _ = _toy(store)
    with pytest.raises(ValueError, match="step 3 went wrong"):
        _toy(nodes.store("ada"), "raise:3")
    ben = nodes.store("ben")
    ref, decision = _toy(ben)
    assert (decision.action, decision.step) == ("RESUME", 2) and ref == whole
    record = ben.record(KEY)
    assert (record.attempts, record.resumed_from) == (2, 2)
    for node in ("ben", "ada", "cy"):
        lines = attempts.metrics(nodes.store(node).attempts(KEY)).read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4], f"{node} has the metrics of both nodes"
    assert list(ben.shared.read(name_of(KEY)).value["work"]["files"]) == [attempts.METRICS]
    assert len(_files(nodes)) == 1, "no checkpoint stays"


def test_an_upload_that_ends_after_the_commit_does_not_replace_the_metrics_of_the_result(nodes, monkeypatch):
    monkeypatch.setattr(unfinished, "LOOK_SECONDS", 0.01)
    upload, ended = Lease.save_work, threading.Event()

    def late(lease: Lease, folder: Path, **noted: Any) -> None:
        assert ended.wait(30)
        upload(lease, folder, **noted)

    def commit(lease: Lease, *args: Any, **options: Any) -> Any:
        try:
            return store(lease, *args, **options)
        finally:
            ended.set()

    store = Lease.commit
    monkeypatch.setattr(Lease, "save_work", late)
    monkeypatch.setattr(Lease, "commit", commit)
    _toy(nodes.store("ada"), seconds_a_step=0.05)
    assert len(attempts.metrics(nodes.store("ben").attempts(KEY)).read_text().splitlines()) == 4


def test_a_node_does_not_go_on_with_what_another_node_has_started_over(nodes):
    with pytest.raises(ValueError, match="step 3 went wrong"):
        _toy(nodes.store("ada"), "raise:3")
    with pytest.raises(ValueError, match="step 1 went wrong"):
        run_toy(nodes.store("ben"), toy_spec(ToyConfig(steps=4, trouble="raise:1")), force=True)
    _, decision = _toy(nodes.store("ada"))
    assert (decision.action, decision.step) == ("RUN", None), "as on a disk"
    record = nodes.store("ada").record(KEY)
    assert (record.attempts, record.resumed_from) == (3, None)


def test_checkpoints_are_uploaded_while_the_stage_runs_and_only_the_last_one_stays(nodes, monkeypatch):
    monkeypatch.setattr(unfinished, "LOOK_SECONDS", 0.01)
    seen: list[str] = []
    look = unfinished._Keeper.look

    def note(keeper: unfinished._Keeper) -> None:
        look(keeper)
        if keeper._uploaded and keeper._uploaded not in seen:
            seen.append(keeper._uploaded)

    monkeypatch.setattr(unfinished._Keeper, "look", note)
    ada = nodes.store("ada")
    with pytest.raises(ValueError, match="the end went wrong"):
        _toy(ada, "raise:end", seconds_a_step=0.1)
    assert len(seen) >= 2 and seen[-1].startswith("step-0000000004")
    files = ada.shared.read(name_of(KEY)).value["work"]["files"]
    assert {Path(name).parts[1] for name in files if name.startswith("ckpt/")} == {seen[-1]}
    assert _files(nodes) == sorted({f"v2/work/{KEY}/{owner}/{sha}" for _, sha, owner in files.values()})


def test_a_node_that_lost_its_lease_publishes_no_checkpoint(nodes):
    ada, ben = nodes.store("ada"), nodes.store("ben")
    with ada.lease(KEY) as lease:
        table = ben.shared.read(name_of(KEY))
        ben.shared.write(table.name, {"lease": table.value["lease"] | {"token": "thief"}}, table.version)
        work = ada.layout.attempt(KEY) / "work-1"
        checkpoint = work / "ckpt" / "step-1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_text("late")
        keeper = unfinished._Keeper(lease, 1, work)
        keeper.look()
        assert keeper.stop.is_set() and "work" not in ben.shared.read(name_of(KEY)).value


def test_a_bucket_that_is_away_costs_the_copy_and_not_the_stage(nodes, monkeypatch, caplog):
    upload = ObstoreServer.upload

    def away(server: ObstoreServer, name: str, path: Path) -> None:
        if "/.keep-" in str(path):
            raise Unreachable("store", server.uri, "no route to host", "check the network")
        upload(server, name, path)

    monkeypatch.setattr(ObstoreServer, "upload", away)
    monkeypatch.setattr("rlhf_core.store.bucket.PATIENCE_S", 0.0)
    monkeypatch.setattr("rlhf_core.store.bucket.RETRY_S", 0.01)
    monkeypatch.setattr(unfinished, "LOOK_SECONDS", 0.01)
    ada = nodes.store("ada")
    ref, _ = _toy(ada, seconds_a_step=0.05)
    assert ada.holds(ref) and "could not upload a checkpoint" in caplog.text
