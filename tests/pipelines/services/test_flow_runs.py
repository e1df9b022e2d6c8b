"""What a kill leaves in Prefect, under a real Prefect server."""

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from pipelines.services.home import Home
from rlhf_core.tracking import mlflow_client

pytestmark = pytest.mark.slow

OURS = "rlhf-pipeline"
DEAD = {"owner.pid": "1", "owner.pid_started": "1"}


@pytest.fixture(autouse=True)
def _nothing_left_behind(client: Any) -> Iterator[None]:
    """End what a test leaves at work, on the server that the tests share."""
    yield
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.states import Cancelled

    active = FlowRunFilter(state={"type": {"any_": ["RUNNING", "CANCELLING", "PENDING", "PAUSED"]}})
    for flow_run in client.read_flow_runs(flow_run_filter=active):
        client.set_flow_run_state(flow_run.id, Cancelled(), force=True)


@pytest.fixture
def shared(prefect_home: Home, monkeypatch) -> None:
    """Let the server of the tests be one that the user set, on which others may have runs."""
    monkeypatch.delenv("RLHF_OWN_SETTINGS")


def a_flow(name: str) -> Any:
    from prefect import flow

    @flow(name=name)
    def body() -> None:
        return None

    return body


def started(
    client: Any, changes: dict[str, str] | None, state: Any = None, *, home: Home | None = None, name: str = OURS
) -> Any:
    """A flow run in a state, as a process with these labels left it; None: a run of something else."""
    flow_run = client.create_flow_run(a_flow(name), state=state or prefect_running())
    if changes is not None:
        label = {"rlhf.home": (home or Home.here()).identity}
        client.update_flow_run_labels(flow_run.id, mlflow_client.owner_tags() | label | changes)
    return flow_run.id


def deployed(client: Any, name: str, *, home: Home | None, flow_name: str = OURS, state: Any = None) -> Any:
    """A flow run of a deployment that a state folder serves, or nobody that we know."""
    tags = [f"rlhf-home-{home.identity}"] if home else []
    flow_id = client.create_flow(a_flow(flow_name))
    run = client.create_flow_run_from_deployment(client.create_deployment(flow_id, name=name, tags=tags)).id
    if state is not None:
        client.set_flow_run_state(run, state, force=True)
    return run


def prefect_running() -> Any:
    from prefect.states import Running

    return Running()


def a_task_of(client: Any, flow_run: Any) -> Any:
    from prefect import task
    from prefect.states import Running

    @task
    def stage() -> None:
        return None

    created = client.create_task_run(stage, flow_run, dynamic_key="0", state=Running())
    return created.id


def test_a_run_whose_process_is_gone_is_crashed_with_its_tasks_and_others_are_left_alone(client):
    from prefect.states import Paused

    from pipelines.services.flow_runs import reconcile_flow_runs

    dead, alive, unknown = started(client, DEAD), started(client, {}), started(client, None)
    elsewhere = started(client, DEAD | {"owner.host": "elsewhere"})
    waiting = started(client, DEAD, Paused())
    task_run = a_task_of(client, dead)
    (corrected,) = reconcile_flow_runs()
    assert (corrected.id, corrected.state) == (str(dead), "Crashed")
    assert "process 1 on" in str(corrected) and "ended without reporting a result; run it again and it resumes" in str(
        corrected
    )
    assert client.read_flow_run(dead).state.name == client.read_task_run(task_run).state.name == "Crashed"
    states = [client.read_flow_run(left).state.name for left in (alive, unknown, elsewhere, waiting)]
    assert states == ["Running", "Running", "Running", "Paused"]
    assert reconcile_flow_runs() == []


def test_a_run_that_was_just_started_again_is_not_judged_by_the_labels_of_the_dead_process(client):
    from pipelines.services.flow_runs import own, reconcile_flow_runs

    retried = started(client, DEAD | {"owner.run_count": "0"})  # its start is the first: the labels are older
    assert reconcile_flow_runs() == []
    own(retried)
    labels = client.read_flow_run(retried).labels
    assert (labels["owner.pid"], labels["owner.run_count"]) == (mlflow_client.owner_tags()["owner.pid"], "1")
    assert reconcile_flow_runs() == []


@pytest.mark.parametrize(("end", "expected"), [("Completed", "Completed"), ("Failed", "Crashed")])
def test_a_task_that_outlives_its_flow_run_on_the_page_is_ended(client, end, expected, monkeypatch):
    from prefect import states

    from pipelines.services import flow_runs

    flow_run = started(client, {})
    task_run = a_task_of(client, flow_run)
    client.set_flow_run_state(flow_run, getattr(states, end)(), force=True)
    assert flow_runs.reconcile_flow_runs() == [], "its own end may still be on its way"
    monkeypatch.setattr(flow_runs, "SETTLED_AFTER", timedelta(0))
    assert [(found.id, found.state) for found in flow_runs.reconcile_flow_runs()] == [(str(task_run), expected)]
    assert client.read_task_run(task_run).state.name == expected


@pytest.mark.usefixtures("shared")
def test_what_is_interrupted_says_so_and_a_run_of_this_terminal_is_left_alone(client, tmp_path):
    from prefect.states import Running

    from pipelines.services.flow_runs import interrupt

    served = deployed(client, "served", home=Home.here())
    foreground = started(client, {})
    others = [
        deployed(client, "nightly-etl", home=None, flow_name="etl", state=Running()),
        deployed(client, "of-another", home=Home(tmp_path), state=Running()),
        deployed(client, "of-a-work-pool", home=None, state=Running()),
    ]
    assert interrupt("stopped") == [], "a run that is only planned is not under way"
    client.set_flow_run_state(served, Running(), force=True)
    assert [(found.id, found.state) for found in interrupt("stopped")] == [(str(served), "Crashed")]
    assert client.read_flow_run(served).state.message == "stopped; run it again and it resumes"
    assert [client.read_flow_run(run).state.name for run in (foreground, *others)] == ["Running"] * 4


def test_a_served_run_that_nobody_started_in_minutes_is_crashed(client, monkeypatch):
    from prefect.states import Pending

    from pipelines.services import flow_runs

    run = deployed(client, "pending", home=Home.here(), state=Pending())
    assert flow_runs.reconcile_flow_runs() == [], "its process may be on its way"
    monkeypatch.setattr(flow_runs, "STARTED_AFTER", timedelta(0))
    (corrected,) = flow_runs.reconcile_flow_runs()
    assert corrected.id == str(run) and corrected.reason.startswith(
        "the process that was supposed to start it has ended"
    )


@pytest.mark.usefixtures("shared")
def test_runs_and_tasks_of_other_flows_and_of_other_state_folders_are_left_alone(client, monkeypatch, tmp_path):
    from prefect.states import Completed, Paused, Pending

    from pipelines.services import flow_runs

    monkeypatch.setattr(flow_runs, "STARTED_AFTER", timedelta(0))
    monkeypatch.setattr(flow_runs, "SETTLED_AFTER", timedelta(0))
    other = Home(tmp_path)
    runs = {
        deployed(client, "etl", home=None, flow_name="etl", state=Pending()): "Pending",
        deployed(client, "of-a-pool", home=None, state=Pending()): "Pending",
        deployed(client, "theirs", home=other, state=Pending()): "Pending",
        deployed(client, "waiting", home=Home.here(), state=Paused()): "Paused",
        started(client, DEAD, home=other): "Running",
        started(client, DEAD, name="etl"): "Running",
    }
    ended = {started(client, {}, name="etl"), started(client, {}, home=other)}
    tasks = [a_task_of(client, run) for run in ended]
    for run in ended:
        client.set_flow_run_state(run, Completed(), force=True)
    assert flow_runs.reconcile_flow_runs() == []
    assert {run: client.read_flow_run(run).state.name for run in runs} == runs
    assert [client.read_task_run(task).state.name for task in tasks] == ["Running", "Running"]


def test_runs_that_an_earlier_version_left_on_our_own_server_are_ours(client, tmp_path):
    from prefect.states import Running

    from pipelines.services.flow_runs import interrupt, reconcile_flow_runs

    earlier = client.create_flow_run(a_flow(OURS), state=Running()).id
    client.update_flow_run_labels(earlier, mlflow_client.owner_tags() | DEAD)  # neither label nor tag of a state folder
    served = deployed(client, "earlier", home=None, state=Running())
    others = [
        started(client, DEAD, home=Home(tmp_path)),
        deployed(client, "anothers", home=Home(tmp_path), state=Running()),
        deployed(client, "another-flow", home=None, flow_name="etl", state=Running()),
    ]
    assert [found.id for found in reconcile_flow_runs()] == [str(earlier)]
    assert [found.id for found in interrupt("stopped")] == [str(served)]
    assert [client.read_flow_run(run).state.name for run in others] == ["Running"] * 3


@pytest.mark.parametrize("shared_by", ["address", "database", "services of a database", "services of an address"])
def test_runs_that_name_no_state_folder_are_left_alone_where_others_may_have_theirs(client, shared_by, monkeypatch):
    from pipelines.services.flow_runs import reconcile_flow_runs
    from pipelines.services.running import Services

    run = client.create_flow_run(a_flow(OURS), state=prefect_running()).id
    client.update_flow_run_labels(run, mlflow_client.owner_tags() | DEAD)
    with monkeypatch.context() as patch:
        if shared_by == "address":
            ours = json.loads(os.environ["RLHF_OWN_SETTINGS"])  # all that `rlhf` itself set, but the address
            patch.setenv("RLHF_OWN_SETTINGS", json.dumps({k: v for k, v in ours.items() if k != "PREFECT_API_URL"}))
        elif shared_by == "database":
            patch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://db/prefect")
        else:  # `rlhf up` was given it in another shell
            theirs = {"prefect_api": os.environ["PREFECT_API_URL"]} if "address" in shared_by else {}
            Services(mlflow_client.owner_tags(), 1, 2, ready=True, shared_database=not theirs, **theirs).write(
                Home.here()
            )
        try:
            assert reconcile_flow_runs() == []
        finally:
            Home.here().services.unlink(missing_ok=True)
            (Home.here().root / "prefect_address").unlink(missing_ok=True)
    assert [found.id for found in reconcile_flow_runs()] == [str(run)]


def test_deployments_of_our_names_that_others_serve_are_noticed(client, tmp_path):
    from pipelines.services.flow_runs import served_elsewhere

    for left in client.read_deployments():  # what other tests served on the server that they share, a moment ago
        client.delete_deployment(left.id)
    deployed(client, "full", home=Home.here())
    deployed(client, "left-behind", home=Home(tmp_path))  # nobody has asked for its work
    assert served_elsewhere() == ""
    from prefect.client.schemas.actions import WorkPoolCreate

    client.create_work_pool(WorkPoolCreate(name="far", type="process"))
    client.create_deployment(client.create_flow(a_flow(OURS)), name="sft", work_pool_name="far")
    assert "rlhf-pipeline/sft: is served by the work pool far" in served_elsewhere()
