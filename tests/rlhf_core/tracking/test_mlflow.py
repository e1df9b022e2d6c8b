"""Runs as MLflow stores them, read back with MLflow's own client."""

import getpass
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from rlhf_core.tracking import mlflow_client
from rlhf_core.tracking.mlflow import MlflowTracker, end_all_dead_runs, end_dead_runs
from rlhf_core.tracking.mlflow_client import TrackingError
from rlhf_core.tracking.mlflow_delivery import DESCRIPTION_CHARACTERS, STAGES_TAG
from rlhf_core.tracking.pipeline_runs import stage_runs

Made = Any


@pytest.fixture
def make(database: Path, tmp_path) -> Iterator[Made]:
    trackers: list[MlflowTracker] = []

    def tracker(name: str = "run", *, run_id: str | None = None, **settings: Any) -> MlflowTracker:
        """Return the tracker of a run that has been started."""
        made = MlflowTracker(f"sqlite:///{database}", experiment="rlhf", artifact_root=tmp_path / "files")
        trackers.append(made)
        made.start(name, run_id=run_id, **{"params": {}, "tags": {}} | settings)
        return made

    yield tracker
    for item in trackers:
        item._outbox.close(10.0)


@pytest.fixture
def client(database: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{database}")


def test_tags_of_a_pipeline_run_are_set_while_it_runs(make, client):
    tracker = make("nightly")
    parent = tracker.run_id
    tracker.tag({"gate.quality": "blocked: accuracy_low 0.61 < 0.65", "state.message": "key sk-abcdefghijklmnop1234"})
    tracker.finish("KILLED", note="")
    tags = client.get_run(parent).data.tags
    assert tags["gate.quality"] == "blocked: accuracy_low 0.61 < 0.65" and "sk-abc" not in tags["state.message"]


def test_a_pipeline_is_a_parent_run_and_a_stage_a_run_below_it(make, client):
    params = {"seed": 17, "hub": {"token": "hunter2"}}
    tracker = make("nightly", params=params, tags={"prefect.url": "http://127.0.0.1:4200/runs/1"})
    parent = tracker.run_id
    stage = tracker.stage("sft", key="k1", params={"loop": {"epochs": 2}}, tags={})
    stage.finish("FINISHED")
    tracker.finish("FAILED", note="ppo failed")

    run = client.get_run(parent)
    assert (run.info.run_name, run.info.status) == ("nightly", "FAILED")
    assert run.data.params == {"seed": "17", "hub.token": "***"}
    assert stage_runs(run.data.tags) == {"sft": stage.run_id}
    note = run.data.tags["mlflow.note.content"]
    assert "- [prefect.url](http://127.0.0.1:4200/runs/1)" in note
    assert note.startswith("ppo failed\n\n**nightly**")
    child = client.get_run(stage.run_id)
    assert (child.info.run_name, child.info.status) == ("sft · nightly", "FINISHED")
    assert child.data.tags["mlflow.parentRunId"] == parent
    assert run.data.tags["mlflow.user"] == child.data.tags["mlflow.user"] == getpass.getuser()
    assert child.data.params == {"loop.epochs": "2"}


def test_a_stage_that_goes_on_uses_the_run_of_its_key(make, client):
    first = make(params={"seed": 1})
    stage = first.stage("sft", key="k1", params={"a": 1}, tags={})
    stage.finish("FAILED")
    first.finish("FAILED", note="")

    second = make(run_id=first.run_id, params={"seed": 1})
    assert second.run_id == first.run_id
    again = second.stage("sft", key="k1", params={"a": 2, "b": 3}, tags={})
    assert again.run_id == stage.run_id
    run = client.get_run(again.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.tags["attempt"] == "2"
    assert run.data.params == {"a": "1", "b": "3"}  # parameters cannot change; the new value is a tag
    assert run.data.tags["attempt.a"] == "2"


def test_a_process_that_was_taken_over_does_not_end_the_run_of_its_successor(make, client):
    first, second = make(), make()
    stages = []
    for tracker in (first, second):
        stages.append(tracker.stage("sft", key="k1", params={}, tags={}))
    assert stages[0].run_id == stages[1].run_id
    stages[0].finish("FAILED")
    assert client.get_run(stages[0].run_id).info.status == "RUNNING"
    stages[1].finish("FINISHED")
    assert client.get_run(stages[0].run_id).info.status == "FINISHED"
    first.finish("FAILED", note="sft was taken over")
    assert client.get_run(first.run_id).info.status == "FAILED"


def test_steps_that_are_recorded_again_leave_no_second_point(make, client):
    first = make()
    stage = first.stage("ppo", key="k1", params={}, tags={})
    for step in range(1, 8):
        stage.metrics(step, {"ppo/reward/mean": float(step)})
    first.finish("KILLED", note="")

    second = make()
    stage = second.stage("ppo", key="k1", params={}, tags={})
    for step in range(5, 11):  # resumed from the checkpoint of step 4
        stage.metrics(step, {"ppo/reward/mean": float(step), "ppo/eval/gold": 0.5})
    assert stage.flush()
    history = client.get_metric_history(stage.run_id, "ppo/reward/mean")
    assert sorted(point.step for point in history) == list(range(1, 11))
    assert sorted(point.step for point in client.get_metric_history(stage.run_id, "ppo/eval/gold")) == [
        5,
        6,
        7,
        8,
        9,
        10,
    ]


def test_values_that_are_not_finite_are_left_out(make, client):
    tracker = make()
    stage = tracker.stage("sft", key="k1", params={}, tags={})
    stage.metrics(1, {"a": float("nan"), "b": 2.0})
    assert stage.flush()
    assert client.get_run(stage.run_id).data.metrics == {"b": 2.0}


@pytest.mark.parametrize(("count", "length", "further"), [(30, 5, 0), (40, 200, 5)])
def test_a_run_of_many_stages_has_few_tags(make, client, count, length, further):
    """A label of 203 characters takes 203 + 20 in the table's 8,000: 35 fit (7,805), and five get a tag each."""
    tracker = make("nightly", tags={"prefect.url": "http://127.0.0.1:4200/runs/1"})
    labels = [f"{number:02}/{'x' * length}" for number in range(count)]
    for label in labels:
        tracker.cached(label, run_id="abc", key="k")
    tracker.finish("FINISHED", note="")
    tags = client.get_run(tracker.run_id).data.tags
    assert stage_runs(tags) == dict.fromkeys(labels, "abc (cached)")
    shown = [tag for tag in tags if not tag.startswith("mlflow.")]
    assert len(shown) == 6 + further and STAGES_TAG in tags


def test_a_name_that_mlflow_refuses_costs_no_metric(make, client):
    tracker = make()
    stage = tracker.stage("harness", key="k1", params={}, tags={})
    stage.metrics(0, {"prompts": 8.0, "humaneval/pass@1": 0.5, "gsm8k/exact_match/maj@8": 0.25})
    stage.metrics(0, {"humaneval/pass@1": 0.5})
    assert stage.flush()
    found = client.get_run(stage.run_id).data.metrics
    assert found == {"prompts": 8.0, "humaneval/pass_1": 0.5, "gsm8k/exact_match/maj_8": 0.25}
    assert len(client.get_metric_history(stage.run_id, "humaneval/pass_1")) == 1


def test_a_cached_stage_opens_no_run_and_is_noted_on_the_parent(make, client):
    tracker = make("run")
    parent = tracker.run_id
    made = tracker.stage("sft", key="k1", params={}, tags={}).run_id
    tracker.cached("sft again", run_id=None, key="k1")
    tracker.cached("dpo", run_id="abc", key="k2")
    tracker.finish("FINISHED", note="")
    tags = client.get_run(parent).data.tags
    assert stage_runs(tags)["sft again"] == f"{made} (cached)"
    assert stage_runs(tags)["dpo"] == "abc (cached)"
    assert len(client.search_runs([client.get_experiment_by_name("rlhf").experiment_id])) == 2


def test_a_run_that_was_killed_after_its_commit_is_finished_once_its_stage_is_a_hit(make, client):
    """The kill came between the commit and the end of the run; the campaign of kills found one left KILLED."""
    tracker = make()
    ended, failed = (tracker.stage(label, key=label, params={}, tags={}).run_id for label in ("sft", "dpo"))
    tracker.finish("KILLED", note="")
    client.set_terminated(ended, status="KILLED", end_time=1_700_000_000_000)
    client.set_terminated(failed, status="FAILED")
    again = make()
    again.cached("sft", run_id=ended, key="sft")
    again.cached("dpo", run_id=failed, key="dpo")
    again.finish("FINISHED", note="")
    info = client.get_run(ended).info
    assert (info.status, info.end_time) == ("FINISHED", 1_700_000_000_000)
    assert client.get_run(failed).info.status == "FAILED", "its error came after the commit, and is true"


def test_tables_and_files_arrive_even_when_the_original_is_moved_away(make, client, tmp_path):
    tracker = make()
    stage = tracker.stage("evaluate", key="k1", params={}, tags={})
    stage.table("samples/step_0010", ["prompt", "reward"], [["hi", 1.0]])
    figure = tmp_path / "frontier.png"
    figure.write_bytes(b"png")
    stage.file(figure, "figures")
    figure.unlink()
    tracker.finish("FINISHED", note="")
    run = client.get_run(stage.run_id)
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples/step_0010.json", "type": "table"}]
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    assert json.loads((folder / "samples/step_0010.json").read_text()) == {
        "columns": ["prompt", "reward"],
        "data": [["hi", 1.0]],
    }
    assert (folder / "figures/frontier.png").read_bytes() == b"png"
    assert not list(tmp_path.rglob("file-*"))  # the copy in the spool is gone


def test_lineage_runs_from_the_stage_that_made_a_model_to_the_one_that_reads_it(make, client):
    tracker = make()
    digest = "d" * 64
    sft = tracker.stage("sft", key="k1", params={}, tags={})
    sft.dataset("demonstrations", "ab" * 32, "training")
    for _ in range(2):  # an attempt that is made again changes nothing
        sft.model("sft", digest, "store://d")
    ppo = tracker.stage("ppo", key="k2", params={}, tags={})
    ppo.input_model(digest)
    tracker.finish("FINISHED", note="")

    made = client.get_run(sft.run_id)
    (output,) = made.outputs.model_outputs
    (data,) = made.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("demonstrations", "ab" * 16)
    assert {tag.key: tag.value for tag in data.tags} == {"mlflow.data.context": "training"}
    (read,) = client.get_run(ppo.run_id).inputs.model_inputs
    assert read.model_id == output.model_id
    model = client.get_logged_model(output.model_id)
    assert (model.tags["store.digest"], model.tags["store.uri"]) == (digest, "store://d")


def test_tags_are_set_while_a_stage_runs_and_hold_no_secret(make, client):
    tracker = make()
    ppo = tracker.stage("ppo", key="k1", params={}, tags={})
    for text in ("first", "rolled back: https://me:hunter2@host/"):
        ppo.set_tags({"monitor.answer length": text})
    tracker.finish("FINISHED", note="")
    tag = client.get_run(ppo.run_id).data.tags["monitor.answer length"]
    assert tag.startswith("rolled back: ")
    assert "hunter2" not in tag


def test_a_model_is_registered_by_reference_with_aliases_and_tags(make, client):
    tracker = make()
    stage = tracker.stage("publish", key="k1", params={}, tags={})
    stage.model("sft", "d1", "store://d1")
    stage.model("ppo", "d2", "store://d2")
    assert stage.register("rlhf-policy", "d1", aliases=["candidate", "champion"], tags={"gate": "passed"}) == "1"
    assert stage.register("rlhf-policy", "d2", aliases=["candidate"], tags={"gate": "failed"}) == "2"
    assert (
        stage.register("rlhf-policy", "d2", aliases=["candidate"], tags={"gate": "failed"}) == "2"
    )  # a second attempt
    assert client.get_model_version_by_alias("rlhf-policy", "champion").version == 1
    candidate = client.get_model_version_by_alias("rlhf-policy", "candidate")
    assert candidate.version == 2
    assert candidate.tags == {"gate": "failed", "store.digest": "d2"}
    assert client.get_logged_model(candidate.source.removeprefix("models:/")).tags["store.digest"] == "d2"
    tracker.describe("rlhf-policy", "d2", f"Made by [run](runs:/{tracker.run_id})\n\n{'x' * 9000}")
    tracker.describe("rlhf-policy", "none", "of no version")
    tracker.finish("FINISHED", note="")
    described = client.get_model_version("rlhf-policy", "2").description
    assert described.startswith("Made by [run](#/experiments/") and len(described) == DESCRIPTION_CHARACTERS
    assert client.get_model_version("rlhf-policy", "1").description in (None, "")


def test_an_outage_costs_no_record(empty_database, tmp_path):
    """The database's folder is missing its place (a file stands there), then comes back."""
    blocked = tmp_path / "server"
    blocked.write_text("")
    tracker = MlflowTracker(
        f"sqlite:///{blocked}/mlflow.db", experiment="rlhf", artifact_root=None, spool=tmp_path / "spool"
    )
    assert tracker.start("run", run_id=None, params={"seed": 17}, tags={}) == ""
    stage = tracker.stage("sft", key="k1", params={}, tags={})
    stage.metrics(1, {"loss": 2.0})
    assert stage.register("rlhf-policy", "d1", aliases=["candidate"], tags={}) == "pending"
    assert tracker.offline

    blocked.unlink()
    blocked.mkdir()
    shutil.copy(empty_database, blocked / "mlflow.db")
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")
    client = MlflowClient(tracking_uri=f"sqlite:///{blocked}/mlflow.db")
    assert client.get_run(tracker.run_id).data.params == {"seed": "17"}
    assert client.get_run(stage.run_id).info.status == "FINISHED"
    assert client.get_run(stage.run_id).data.metrics == {"loss": 2.0}
    assert client.get_model_version_by_alias("rlhf-policy", "candidate").tags["store.digest"] == "d1"


def test_records_follow_mlflow_to_another_address(database, empty_database, tmp_path, client, monkeypatch):
    """Its server ends during a run, and the runs are then written to the database itself."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    places = [f"sqlite:///{shutil.copy(empty_database, tmp_path / 'first.db')}", f"sqlite:///{database}"]
    tracker = MlflowTracker(places[0], experiment="rlhf", artifact_root=tmp_path / "files", locate=lambda: places[0])
    tracker.start("run", run_id=None, params={}, tags={})
    shutil.copy(tmp_path / "first.db", database)  # the database behind the server
    del places[0]
    stage = tracker.stage("sft", key="k1", params={}, tags={})
    stage.finish("FINISHED")
    tracker.finish("FINISHED", note="")
    assert stage.uri == places[0]
    assert "MLFLOW_TRACKING_URI" not in os.environ, "it would pass for a server of the user's"
    assert [client.get_run(one).info.status for one in (tracker.run_id, stage.run_id)] == ["FINISHED", "FINISHED"]


def test_only_runs_whose_process_is_gone_are_ended(make, client):
    tracker = make()
    living = tracker.run_id
    experiment = client.get_experiment_by_name("rlhf").experiment_id
    dead = client.create_run(experiment, tags=mlflow_client.owner_tags() | {"owner.pid_started": "1"}).info.run_id
    foreign = client.create_run(experiment).info.run_id
    assert [run.run_id for run in end_dead_runs(client, experiment)] == [dead]
    assert [client.get_run(run).info.status for run in (living, dead, foreign)] == ["RUNNING", "KILLED", "RUNNING"]


def test_every_experiment_is_reconciled_and_what_was_ended_is_named(client, database):
    elsewhere = client.create_experiment("another")
    changes = {"owner.pid_started": "1", "mlflow.runName": "night"}
    dead = client.create_run(elsewhere, tags=mlflow_client.owner_tags() | changes).info.run_id
    (ended,) = end_all_dead_runs(f"sqlite:///{database}")
    assert (ended.experiment, ended.name, ended.run_id) == ("another", "night", dead)
    assert client.get_run(dead).info.status == "KILLED"
    assert end_all_dead_runs(f"sqlite:///{database}") == []


def test_a_server_that_is_away_is_one_line_for_who_asked():
    with pytest.raises(TrackingError, match=r"^MLflow at http://127.0.0.1:9: does not answer \(.*\); try again$"):
        end_all_dead_runs("http://127.0.0.1:9")


def test_a_stage_that_starts_over_gets_a_run_of_its_own(make, client):
    tracker = make()
    ids = []
    for loss, fresh in ((2.0, False), (1.0, True)):
        stage = tracker.stage("sft", key="k" * 64, params={}, tags={}, fresh=fresh)
        stage.metrics(1, {"loss": loss})
        stage.finish("FINISHED")
        ids.append(stage.run_id)
    tracker.finish("FINISHED", note="")
    assert [client.get_run(run).data.metrics for run in ids] == [{"loss": 2.0}, {"loss": 1.0}]


def test_a_password_in_the_address_is_not_told(tmp_path, caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tracker = MlflowTracker(
        f"http://me:hunter2@127.0.0.1:{port}", experiment="rlhf", artifact_root=None, spool=tmp_path
    )
    tracker.start("run", run_id=None, params={}, tags={})
    tracker.finish("FINISHED", note="")
    assert "does not answer" in caplog.text and "hunter2" not in caplog.text


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that everybody may ask for experiments with the status in its path, and nobody may create runs at."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = int(self.path.split("/")[1])
            reads = status == 200
            body = (
                b'{"experiment": {"experiment_id": "1", "name": "rlhf", "lifecycle_stage": "active"}}'
                if reads
                else b"no"
            )
            self._answer(status, body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path.endswith("runs/search"):
                self._answer(200, b'{"runs": []}')
            else:
                self._answer(403, b"Permission denied")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:hunter2@127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("uri", "rule"),
    [
        ("{server}/401", ": refuses this user .*401.*; set MLFLOW_TRACKING_USERNAME"),
        ("{server}/403", ": refuses this user .*403.*; set MLFLOW_TRACKING_USERNAME"),
        ("{server}/200", ": refuses this user .*403.*; set MLFLOW_TRACKING_USERNAME"),  # may read, may not create a run
        ("mysql+pymysql://me:hunter2@127.0.0.1/mlflow", ": needs the package pymysql"),
    ],
)
def test_a_server_that_will_never_record_ends_a_run_at_its_start(refusing, uri, rule, tmp_path):
    tracker = MlflowTracker(uri.format(server=refusing), experiment="rlhf", artifact_root=None, spool=tmp_path)
    with pytest.raises(TrackingError, match=f"^MLFLOW_TRACKING_URI = .*{rule}.*state folder$") as raised:
        tracker.start("run", run_id=None, params={}, tags={})
    assert "hunter2" not in str(raised.value)


def test_a_server_that_hangs_costs_a_run_seconds_and_no_record(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=None, spool=tmp_path / "spool")
        assert tracker.start("run", run_id=None, params={}, tags={}) == ""
        stage = tracker.stage("sft", key="k1", params={}, tags={})
        for step in range(3):
            stage.metrics(step, {"loss": 1.0})
        stage.finish("FINISHED")
        tracker.finish("FINISHED", note="")
        assert time.monotonic() - began < 10
    (spool,) = (tmp_path / "spool").rglob("*.jsonl")
    kept = [json.loads(line)["op"] for line in spool.read_text().splitlines()]
    assert kept == ["open_run", "open_stage", "metrics", "metrics", "metrics", "finish", "finish"]


def test_a_kill_between_the_tracker_and_the_file_of_metrics_leaves_each_point_once(make, client, tmp_path):
    """The stage recorded step 2 with the tracker and died before it noted so: the resumed one records it again."""
    tracker = make("first")
    killed = tracker.stage("toy", key="k1", params={}, tags={})
    for step in (1, 2):
        killed.metrics(step, {"toy/loss": 1.0 / step})
    tracker._outbox.close(10.0)
    resumed = make("second")
    stage = resumed.stage("toy", key="k1", params={}, tags={})
    for step in (2, 3):
        stage.metrics(step, {"toy/loss": 1.0 / step})
    stage.finish("FINISHED")
    history = client.get_metric_history(stage.run_id, "toy/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]


def test_a_process_that_joins_a_run_records_below_it_and_leaves_it_to_its_owner(make, client, database, tmp_path):
    tracker = make("nightly")
    parent = tracker.run_id
    joined = MlflowTracker(
        f"sqlite:///{database}", experiment="rlhf", artifact_root=tmp_path / "files", join=tracker.token
    )
    stage = joined.stage("toy", key="k1", params={}, tags={})
    stage.finish("FINISHED")
    joined.leave()
    assert client.get_run(stage.run_id).data.tags["mlflow.parentRunId"] == parent
    assert client.get_run(stage.run_id).info.status == "FINISHED"
    assert client.get_run(parent).info.status == "RUNNING"
    tracker.finish("FINISHED", note="")
    assert client.get_run(parent).data.tags["stage.toy"] == stage.run_id
