"""Pipeline runs, found again in MLflow."""

import pytest

from rlhf_core.tracking.mlflow import MlflowTracker
from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG, TRAINING, TrackingError, open_client
from rlhf_core.tracking.pipeline_runs import close_runs, find_run


def test_a_run_is_found_by_id_and_by_name_with_the_keys_of_its_stages(database, tmp_path):
    uri = f"sqlite:///{database}"
    tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=tmp_path / "files")
    run_id = tracker.start("tiny ppo.kl_coef=0.1 (3f2a)", run_id=None, params={"ppo": {"kl_coef": 0.1}}, tags={})
    made = tracker.stage("sft", key="key-of-sft", params={}, tags={})
    made.finish("FINISHED")
    tracker.cached("reward_model", run_id=made.run_id, key="key-of-sft")
    tracker.parent.metrics(0, {"evaluate/ppo/gold": 1.5})
    tracker.finish("FINISHED", note=f"- [sft](runs:/{made.run_id}): RUN")

    for wanted in (run_id, "tiny ppo.kl_coef=0.1 (3f2a)", "tiny ppo.kl_coef=0.1"):
        found = find_run(uri, wanted)
        assert found is not None and (found.run_id, found.params) == (run_id, {"ppo.kl_coef": "0.1"})
        assert found.keys == {"sft": "key-of-sft", "reward_model": "key-of-sft"}
    assert [find_run(uri, wanted) for wanted in ("tiny", "x' or 'a", made.run_id)] == [None, None, None]

    run = open_client(uri).get_run(run_id)
    assert run.data.metrics == {"evaluate/ppo/gold": 1.5}
    link = f"[sft](#/experiments/{run.info.experiment_id}/runs/{made.run_id}{TRAINING})"
    assert link in run.data.tags["mlflow.note.content"]


def test_the_newest_run_is_found_whether_its_name_has_a_token_or_not_and_names_are_taken_literally(database, tmp_path):
    uri, ids = f"sqlite:///{database}", {}
    for name in ("my_run", "my_run (3f2a)", "myXrun (3f2b)"):
        tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=tmp_path / "files")
        ids[name] = tracker.start(name, run_id=None, params={}, tags={})
        tracker.finish("FINISHED", note="")
    found = find_run(uri, "my_run")
    assert found is not None and found.run_id == ids["my_run (3f2a)"]


def test_a_link_to_the_run_of_a_hit_leads_to_its_own_experiment(database, tmp_path):
    uri, made = f"sqlite:///{database}", []
    for experiment in ("first", "second"):
        tracker = MlflowTracker(uri, experiment=experiment, artifact_root=tmp_path / experiment)
        made.append(tracker.start(experiment, run_id=None, params={}, tags={}))
        tracker.finish("FINISHED", note=f"- [sft](runs:/{made[0]}): HIT, [gone](runs:/{'0' * 32})")
    client = open_client(uri)
    note = client.get_run(made[1]).data.tags["mlflow.note.content"]
    assert f"[sft](#/experiments/{client.get_run(made[0]).info.experiment_id}/runs/{made[0]}{TRAINING})" in note
    assert f"[gone](runs:/{'0' * 32})" in note


def test_a_run_that_waited_is_finished_when_a_later_one_has_done_its_work(database, tmp_path):
    uri, ids = f"sqlite:///{database}", {}
    for status in ("SCHEDULED", "KILLED"):
        tracker = MlflowTracker(uri, experiment="rlhf", artifact_root=tmp_path / "files")
        ids[status] = tracker.start(status, run_id=None, params={}, tags={FLOW_RUN_TAG: status})
        tracker.finish(status, note="")
    client = open_client(uri)
    assert [client.get_run(run).info.status for run in ids.values()] == ["SCHEDULED", "KILLED"]
    close_runs(uri, list(ids))
    closed = [client.get_run(run) for run in ids.values()]
    assert [run.info.status for run in closed] == ["FINISHED", "KILLED"]
    assert {run.data.tags["state"] for run in closed} == {"Closed"}


def test_no_database_is_made_to_look_for_a_run(tmp_path):
    assert find_run(f"sqlite:///{tmp_path / 'none.db'}", "tiny") is None and list(tmp_path.iterdir()) == []


def test_a_server_that_is_away_is_an_error():
    with pytest.raises(TrackingError, match=r"^MLflow at http://127.0.0.1:9: does not answer"):
        find_run("http://127.0.0.1:9", "tiny")
