"""What a kill leaves in Prefect, under a real Prefect server."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from pipelines.home import Home
from rlhf_core.tracking import owner

pytestmark = pytest.mark.slow

DEAD = {"owner.pid": "1", "owner.pid_started": "1"}


@pytest.fixture
def client(prefect_home: Home) -> Iterator[Any]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def started(client: Any, changes: dict[str, str] | None, state: Any = None) -> Any:
    """A flow run in a state, as a process with these labels left it; None: a run of something else."""
    from prefect import flow
    from prefect.states import Running

    @flow(name="test-left-behind")
    def body() -> None:
        return None

    flow_run = client.create_flow_run(body, state=state or Running())
    if changes is not None:
        client.update_flow_run_labels(flow_run.id, owner.tags() | changes)
    return flow_run.id


def a_task_of(client: Any, flow_run: Any) -> Any:
    from prefect import task
    from prefect.states import Running

    @task
    def stage() -> None:
        return None

    created = client.create_task_run(stage, flow_run, dynamic_key="0", state=Running())
    return created.id


def test_a_run_whose_process_is_gone_is_crashed_with_its_tasks_and_others_are_left_alone(client: Any) -> None:
    from prefect.states import Paused

    from pipelines.reconcile import reconcile

    dead, alive, unknown = started(client, DEAD), started(client, {}), started(client, None)
    elsewhere = started(client, DEAD | {"owner.host": "elsewhere"})
    waiting = started(client, DEAD, Paused())
    task_run = a_task_of(client, dead)
    (mended,) = reconcile()
    assert (mended.id, mended.state) == (str(dead), "Crashed")
    assert "process 1 on" in str(mended) and "ended without a word; run it again and it resumes" in str(mended)
    assert client.read_flow_run(dead).state.name == client.read_task_run(task_run).state.name == "Crashed"
    states = [client.read_flow_run(left).state.name for left in (alive, unknown, elsewhere, waiting)]
    assert states == ["Running", "Running", "Running", "Paused"]
    assert reconcile() == []


def test_a_run_that_was_just_started_again_is_not_judged_by_the_labels_of_the_dead_process(client: Any) -> None:
    from pipelines.reconcile import own, reconcile

    retried = started(client, DEAD | {"owner.run_count": "0"})  # its start is the first: the labels are older
    assert reconcile() == []
    own(retried)
    labels = client.read_flow_run(retried).labels
    assert (labels["owner.pid"], labels["owner.run_count"]) == (owner.tags()["owner.pid"], "1")
    assert reconcile() == []


@pytest.mark.parametrize(("end", "expected"), [("Completed", "Completed"), ("Failed", "Crashed")])
def test_a_task_that_outlives_its_flow_run_on_the_page_is_ended(
    client: Any, end: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import states

    from pipelines import reconcile

    flow_run = started(client, {})
    task_run = a_task_of(client, flow_run)
    client.set_flow_run_state(flow_run, getattr(states, end)(), force=True)
    assert reconcile.reconcile() == [], "its own end may still be on its way"
    monkeypatch.setattr(reconcile, "SETTLED_AFTER", timedelta(0))
    assert [(found.id, found.state) for found in reconcile.reconcile()] == [(str(task_run), expected)]
    assert client.read_task_run(task_run).state.name == expected


def test_what_is_interrupted_says_so_and_a_run_of_this_terminal_is_left_alone(client: Any) -> None:
    from prefect import flow

    from pipelines.reconcile import interrupt

    @flow(name="test-served")
    def body() -> None:
        return None

    deployment = client.create_deployment(client.create_flow(body), name="served")
    served = client.create_flow_run_from_deployment(deployment).id
    foreground = started(client, {})
    assert interrupt() == [], "a run that is only planned is not under way"
    from prefect.states import Running

    client.set_flow_run_state(served, Running(), force=True)
    assert [(found.id, found.state) for found in interrupt()] == [(str(served), "Crashed")]
    assert client.read_flow_run(served).state.message == "interrupted by rlhf down; run it again and it resumes"
    assert client.read_flow_run(foreground).state.name == "Running"


def test_a_served_run_that_nobody_started_in_minutes_is_crashed(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect import flow
    from prefect.states import Pending

    from pipelines import reconcile

    @flow(name="test-pending")
    def body() -> None:
        return None

    deployment = client.create_deployment(client.create_flow(body), name="pending")
    run = client.create_flow_run_from_deployment(deployment).id
    client.set_flow_run_state(run, Pending(), force=True)
    assert reconcile.reconcile() == [], "its process may be on its way"
    monkeypatch.setattr(reconcile, "STARTED_AFTER", timedelta(0))
    (mended,) = reconcile.reconcile()
    assert mended.id == str(run) and mended.reason.startswith("the process that was to start it is gone")
