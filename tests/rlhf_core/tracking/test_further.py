"""Metrics in further trackers: written beside MLflow's, offline, and never the end of a run."""

import logging

import pytest
from mlflow import MlflowClient

from rlhf_core.tracking import further
from rlhf_core.tracking.further import FurtherTrackers
from rlhf_core.tracking.mlflow import MlflowTracker

KEY = "5" * 64


class Written:
    """A writer that keeps what it gets, and fails after `most` writes."""

    made = []
    most = 100

    def __init__(self, run):
        self.run, self.points, self.closed = run, [], False
        Written.made.append(self)

    def metrics(self, step, values):
        if len(self.points) == self.most:
            raise OSError("disk full")
        self.points.append((step, dict(values)))

    def close(self):
        self.closed = True


@pytest.fixture(autouse=True)
def _writers(monkeypatch):
    monkeypatch.setattr(Written, "made", [])
    monkeypatch.setattr(further, "WRITERS", {**further.WRITERS, "written": Written})


def tracked(database, folder, names):
    uri = f"sqlite:///{database}"
    trackers = FurtherTrackers(names, folder / "trackers", "mini")
    tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=folder / "files", further=trackers)
    tracker.start("mini 7", run_id=None, params={"hub_token": "abc"}, tags={})
    return tracker, MlflowClient(tracking_uri=uri)


def test_metrics_of_stages_and_of_the_run_are_written_with_names_and_without_secrets(database, tmp_path):
    tracker, client = tracked(database, tmp_path, ("written",))
    stage = tracker.stage("sft", key=KEY, params={"api_key": "abc", "epochs": 2}, tags={})
    stage.metrics(1, {"sft/loss": 2.0, "sft/bad": float("nan")})
    stage.metrics(2, {"sft/loss": 1.0})
    stage.finish("FINISHED")
    tracker.parent.metrics(0, {"gold": 3.5})
    tracker.finish("FINISHED", note="")
    stage.metrics(3, {"sft/loss": 0.5})  # after the end, as MLflow drops it
    first, run = Written.made
    assert first.points == [(1, {"sft/loss": 2.0}), (2, {"sft/loss": 1.0})] and run.points == [(0, {"gold": 3.5})]
    assert (first.run.name, first.run.pipeline, run.run.label) == ("sft-55555555", "mini", "mini 7")
    assert first.run.params == {"api_key": "***", "epochs": "2"} and run.run.params == {"hub_token": "***"}
    assert first.closed and run.closed
    assert [one.value for one in client.get_metric_history(stage.run_id, "sft/loss")] == [2.0, 1.0]


def test_a_tracker_that_fails_is_one_warning_and_mlflow_has_everything(database, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Written, "most", 1)
    tracker, client = tracked(database, tmp_path, ("written",))
    stage = tracker.stage("sft", key=KEY, params={}, tags={})
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            stage.metrics(step, {"loss": float(step)})
        tracker.finish("FINISHED", note="")
    assert [line for line in caplog.messages if "written" in line] == [
        "tracking: written gets no more metrics of this run, MLflow has them: OSError('disk full')"
    ]
    assert len(client.get_metric_history(stage.run_id, "loss")) == 4


def test_tensorboard_reads_the_curves_and_a_resumed_stage_goes_on_where_it_was(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra trackers is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(1, 5), range(3, 7)):  # the second attempt resumes from a checkpoint of step 2
        trackers = FurtherTrackers(("tensorboard",), tmp_path, "mini")
        trackers.stage("reward_model/1", KEY, {})
        for step in steps:
            trackers.metrics(KEY, step, {"loss": step / 10 + steps.start})
        trackers.close()
    read = EventAccumulator(str(tmp_path / "tensorboard" / "reward_model" / "1-55555555"))
    read.Reload()
    points = [(one.step, round(one.value, 3)) for one in read.Scalars("loss")]
    assert points == [(1, 1.1), (2, 1.2), (3, 3.3), (4, 3.4), (5, 3.5), (6, 3.6)]


@pytest.mark.slow
def test_wandb_writes_offline_runs(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra trackers is not installed")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    trackers = FurtherTrackers(("wandb",), tmp_path, "mini")
    trackers.stage("sft", KEY, {"epochs": "2"})
    for step in range(3):
        trackers.metrics(KEY, step, {"sft/loss": 1.0 / (step + 1)})
    trackers.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = file.read_bytes()
    assert b"sft/loss" in content and b"sft-55555555" in content and not trackers._failed
