"""Runs of deployments that wait for people: scheduled again once, and only while they wait."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from prefect import flow
from prefect.states import Cancelled, Completed, Running

from pipelines.prefect_flows import tasks
from pipelines.prefect_flows.waiting import checked_apart, halted, note_halt, resume_met
from pipelines.services.flow_runs import FLOW_NAME, reconcile_flow_runs
from pipelines.services.home import Home
from pipelines.services.waits import note_condition, waiting_runs
from rlhf_core.errors import DataError
from rlhf_core.stage.stopping import StageWaiting

WAITS = StageWaiting("collect is waiting: 0 of 12 comparisons are judged", {"name": "x"})


@pytest.fixture
def deployed(client: Any) -> Any:
    """Return what makes a run of a deployment in a given state."""
    flow_id = client.create_flow(flow(name=FLOW_NAME)(lambda: None))
    deployment = client.create_deployment(flow_id, name="collect", entrypoint="x:y")

    def make(state: Any) -> Any:
        made = client.create_flow_run_from_deployment(deployment)
        client.set_flow_run_state(made.id, state, force=True)
        return client.read_flow_run(made.id)

    return make


def state_of(client: Any, flow_run: Any) -> str:
    return str(client.read_flow_run(flow_run.id).state.name)


def all_met(home: Home, names: Sequence[str]) -> list[str]:
    return list(names)


def test_a_waiting_run_goes_on_once_when_people_are_done(home, client, deployed):
    run = deployed(halted(WAITS))
    note_halt(home, run, WAITS)
    assert resume_met(home, lambda home, names: []) == []
    assert state_of(client, run) == "Waiting" and waiting_runs(home) == [str(run.id)]
    assert resume_met(home, all_met) == [str(run.id)]
    assert state_of(client, run) == "Scheduled"
    assert resume_met(home, all_met) == []  # it is not waiting anymore, and not checked
    client.set_flow_run_state(run.id, Running(), force=True)
    assert resume_met(home, lambda *_: pytest.fail("a run at work was checked")) == []
    assert waiting_runs(home) == [str(run.id)]  # it may wait again
    client.set_flow_run_state(run.id, Completed(), force=True)
    assert resume_met(home, all_met) == [] and waiting_runs(home) == []


def test_a_run_that_a_person_cancelled_or_resumed_is_left_alone(home, client, deployed):
    cancelled, resumed = deployed(Cancelled(message="by hand")), deployed(halted(WAITS))
    for run in (cancelled, resumed):
        note_halt(home, run, WAITS)
    note_condition(home, "11111111-2222-3333-4444-555555555555", {"name": "of a deleted run"})

    def meanwhile(home: Home, names: Sequence[str]) -> Sequence[str]:
        client.set_flow_run_state(resumed.id, Running(), force=True)
        return names

    assert resume_met(home, meanwhile) == []
    assert (state_of(client, cancelled), state_of(client, resumed)) == ("Cancelled", "Running")
    assert waiting_runs(home) == [str(resumed.id)]


def test_reconcile_leaves_a_waiting_run_alone(home, client, deployed):
    run = deployed(halted(WAITS))
    assert str(run.id) not in [corrected.id for corrected in reconcile_flow_runs()]
    assert state_of(client, run) == "Waiting"


def test_only_runs_of_deployments_are_noted(home, client, deployed):
    run = deployed(halted(WAITS))
    note_halt(home, run.model_copy(update={"deployment_id": None}), WAITS)
    note_halt(home, run, StageWaiting("waits for something that nobody can check"))
    assert waiting_runs(home) == []


def test_a_run_that_went_on_and_waits_at_a_gate_is_not_started_again_for_the_people_it_waited_for(
    home, client, deployed
):
    run = deployed(halted(WAITS))
    note_halt(home, run, WAITS)
    assert resume_met(home, all_met) == [str(run.id)]
    gate = StageWaiting("WAITING at gate quality: `rlhf approve mini quality`")
    client.set_flow_run_state(run.id, halted(gate), force=True)
    note_halt(home, run, gate)
    assert resume_met(home, all_met) == [] and waiting_runs(home) == []
    assert state_of(client, run) == "Waiting"


def test_the_check_is_a_process_of_its_own(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    note_condition(home, "run-1", {"not": "a condition"})
    assert checked_apart(home, ["run-1"], tmp_path / "log") == []
    assert "flow run run-1" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("said", "error", "level", "shown"),
    [
        ("Finished in state Waiting('x', type=CANCELLED)", None, "INFO", "Finished in state Waiting("),
        ("Finished in state OverBudget('x', type=CANCELLED)", None, "INFO", "Finished in state OverBudget("),
        ("Finished in state Failed('x')", None, "ERROR", "Finished in state Failed("),
        ("Crash detected! Execution was aborted by an interrupt signal.", None, "INFO", "Execution was aborted"),
        ("Crash detected! Execution was aborted by a termination signal.", None, "INFO", "Execution was aborted"),
        ("Crash detected! Execution was aborted by Python system exit call.", None, "ERROR", "Crash detected!"),
        ("Task run failed with exception", DataError("rows.jsonl:3 = 'x': is not JSON"), "ERROR", "rows.jsonl:3 = 'x'"),
        ("Task run failed with exception", ValueError("x"), "ERROR", "Task run failed with exception"),
    ],
)
def test_halts_are_logged_as_information_and_errors_of_the_input_as_their_message(said, error, level, shown):
    assert tasks  # its import adds the filter
    trace = None if error is None else (type(error), error, None)
    record = logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, said, (), trace)
    assert logging.getLogger("prefect.task_runs").filter(record)
    assert record.levelname == level and record.getMessage().startswith(shown)
    assert (record.exc_info is None) is (error is None or isinstance(error, DataError))
