"""A gate is approved and the run finishes: Prefect, MLflow, `runs`, `resume` and `reconcile` agree on it."""

import logging
from contextlib import nullcontext

import pytest

from pipelines.cli import run_command
from pipelines.cli.main import main
from pipelines.execution.request import RunRequest
from pipelines.services.run_notes import run_records
from rlhf_core.stage.stopping import StageWaiting
from rlhf_core.tracking.mlflow_client import open_client
from tests.support.small_pipeline import two_toys, write_mini

GATE = '[[gates]]\nafter = "second"\notherwise = "approve"\nname = "quality"\n'


@pytest.mark.slow
def test_all_agree_that_a_run_which_waited_has_finished(tmp_path, prefect_home, client, monkeypatch, capsys, caplog):
    monkeypatch.setenv("RLHF_HOME", str(prefect_home.root))
    monkeypatch.setattr(run_command, "lifecycle", two_toys)
    monkeypatch.setattr("pipelines.cli.command_flow.lifecycle", two_toys)
    monkeypatch.setattr(run_command, "prefect_server", lambda home: nullcontext())
    profile = write_mini(tmp_path, f'store = "{tmp_path}/store"\n').read_text()
    (tmp_path / "mini.toml").write_text(f'store = "{tmp_path}/store"\n{profile.partition("store =")[0]}{GATE}')
    request = RunRequest(str(tmp_path / "mini.toml"))

    with pytest.raises(StageWaiting), caplog.at_level(logging.INFO, "prefect"):
        run_command.run_request(request)
    (waits,) = run_records(prefect_home)
    assert waits.state == "Waiting" and waits.following.startswith("rlhf approve mini quality --question ")
    assert client.read_flow_run(waits.flow_run).state.name == "Waiting"
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]

    assert main([*waits.following.split()[1:-1], "fine"]) == 0
    run_command.run_request(request)  # everything is in the store
    assert [(one.state, one.following) for one in run_records(prefect_home)] == [("Completed", ""), ("Closed", "")]
    done, closed = run_records(prefect_home)
    assert [client.read_flow_run(one.flow_run).state.name for one in (done, closed)] == ["Completed", "Closed"]
    tracker = open_client(prefect_home.mlflow_uri)
    experiments = [one.experiment_id for one in tracker.search_experiments()]
    runs = {
        run.data.tags["prefect.flow_run_id"]: run
        for run in tracker.search_runs(experiments)
        if "rlhf.run" in run.data.tags
    }
    assert runs[done.flow_run].info.status == "FINISHED" and "state" not in runs[done.flow_run].data.tags
    assert runs[closed.flow_run].data.tags["state"] == "Closed"
    assert runs[closed.flow_run].info.status == "FINISHED"  # while it waited, it was SCHEDULED

    capsys.readouterr()
    monkeypatch.setattr("pipelines.cli.recovery_verbs.some_prefect", lambda home: nullcontext(False))
    monkeypatch.setattr("pipelines.services.reconcile.some_prefect", lambda home: nullcontext(False))
    for one in (done, closed):  # by their ids: other tests leave unfinished runs on this server
        assert main(["resume", str(one.flow_run)]) == 0
    assert main(["reconcile"]) == main(["runs"]) == 0
    out = capsys.readouterr().out
    said = "has completed: nothing to resume", "a later run finished it", "nothing to reconcile"
    assert all(one in out for one in said) and "Waiting" not in out
