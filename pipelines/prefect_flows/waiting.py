"""Resume runs of deployments that wait for people: noted at their end, and started again when people are done."""

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal
from uuid import UUID

from prefect import Flow, flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Scheduled

from pipelines.execution.approving import Meant, answer_gate
from pipelines.execution.resume import ResumeError, resume_flow_run
from pipelines.services.flow_runs import FLOW_NAME, close_halted, own
from pipelines.services.home import Home
from pipelines.services.waits import forget_condition, note_condition, waiting_runs
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage.stopping import RunHalted, StageWaiting
from rlhf_core.tracking.mlflow_client import FLOW_RUN_TAG

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 20.0
CHECK_TIMEOUT_S = 300.0

Check = Callable[[Home, Sequence[str]], Sequence[str]]


def halted(error: RunHalted) -> State[None]:
    """The state of a task or flow that waits for people, is blocked, or is over budget: its process ends.

    `keep_resuming` starts the waiting runs again.
    """
    return Cancelled(name=error.state, message=str(error))


def note_halt(home: Home, flow_run: FlowRun, error: RunHalted) -> None:
    """Record the condition that a run of a deployment waits for, in place of the previous one.

    Runs without a deployment were started in a terminal, where the same command resumes them.
    """
    if flow_run.deployment_id is None:
        return
    if isinstance(error, StageWaiting) and error.condition:
        note_condition(home, str(flow_run.id), error.condition)
    else:
        forget_condition(home, str(flow_run.id))


def close_finished(flow: Flow[..., object], flow_run: FlowRun, state: State) -> None:
    """Close the runs that this one has finished, on Prefect's and MLflow's pages; a hook at the end of a flow."""
    close_halted(str(flow_run.id))


def keep_resuming(home: Home, log: Path) -> None:
    """Look at the waiting runs every `LOOK_EVERY_S` seconds, for ever."""

    def check(home: Home, names: Sequence[str]) -> Sequence[str]:
        return checked_apart(home, names, log)

    while True:
        time.sleep(LOOK_EVERY_S)
        try:
            for name in resume_met(home, check):
                logger.warning("flow run %s: people have judged enough, it goes on", name)
        except Exception as error:  # Prefect's server may be away for a while
            logger.warning("could not look at the runs that wait for people: %s", error)


def resume_met(home: Home, check: Check) -> list[str]:
    """Schedule the waiting runs whose condition is met according to `check`; return their ids.

    A run that is not Waiting anymore is left alone: a person may have resumed or cancelled it.
    """
    noted = waiting_runs(home)
    if not noted:
        return []
    with get_client(sync_client=True) as client:
        due = []
        for name in noted:
            flow_run = _read(client, name)
            if _waits(flow_run):
                due.append(name)
            elif flow_run is None or (flow_run.state is not None and flow_run.state.is_final()):
                forget_condition(home, name)
        resumed = []
        for name in check(home, due) if due else ():
            if _waits(_read(client, name)):  # the check took a while
                state: State[None] = Scheduled(message="people have judged enough")
                client.set_flow_run_state(UUID(name), state, force=True)
                resumed.append(name)
    return resumed


def checked_apart(home: Home, names: Sequence[str], log: Path) -> list[str]:
    """Select the runs whose condition is met, in a separate process."""
    command = [sys.executable, "-P", "-m", "pipelines.services.waits", *names]
    with log.open("ab") as stream:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stream, text=True, timeout=CHECK_TIMEOUT_S, check=True
        )
    return done.stdout.split()


def _waits(flow_run: FlowRun | None) -> bool:
    state = None if flow_run is None else flow_run.state
    return state is not None and state.is_cancelled() and state.name == StageWaiting.state


def _read(client: SyncPrefectClient, name: str) -> FlowRun | None:
    try:
        return client.read_flow_run(UUID(name))
    except (ObjectNotFound, ValueError):  # a name that is no id
        return None


# ---------------------------------------------------------------- approval flow


ANSWER = "Approve or reject an artifact at a gate; a run of a deployment that waits for it then continues."


@flow(name=FLOW_NAME, description=ANSWER, flow_run_name="{decision} {gate}", persist_result=False)
def approve(
    run: str,
    gate: str,
    decision: Literal["approve", "reject"],
    reason: str,
    by: str,
    artifact: str = "",
    store: str = "",
    question: str = "",
) -> str:
    """Answer a gate by the fields of a form, which Prefect describes by these lines.

    Args:
        run: Name of the run that waits, as its message and its card have it.
        gate: Name of the gate, from the same message.
        decision: Whether the stages after the artifact may run.
        reason: Reason, kept with the decision.
        by: Who decides, kept with the decision.
        artifact: Beginning of the artifact's digest, if several wait at the gate.
        store: Folder of the artifact store. If empty, the one in the state folder.
        question: Id of the question, as in the message, if the gate has several.
    """
    hide_in_logs()
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        own(context.flow_run.id)
    meant = Meant(run, gate, artifact=artifact, question=question)
    request, said = answer_gate(meant, decision, reason=reason, store=store, by=by)
    asked = request.question
    flow_runs = [one.links[FLOW_RUN_TAG] for one in request.askers if FLOW_RUN_TAG in one.links]
    return (
        f"gate {asked.gate}, {asked.condition['after']} {asked.digest[:12]}: {said}; {resume_waiting_runs(flow_runs)}"
    )


def resume_waiting_runs(flow_runs: Sequence[str]) -> str:
    """Start the waiting runs of deployments again; return the result, or the remaining steps."""
    by_hand, done = "run the same command again, and it goes on", []
    with get_client(sync_client=True) as client:
        waiting = [one for one in dict.fromkeys(flow_runs) if _waits(_read(client, one))]
    for flow_run in waiting:
        try:
            found = resume_flow_run(flow_run, served=True)
        except ResumeError as error:  # the decision is written down in any case
            done.append(f"{error}; {by_hand}")
        else:
            done += [found.message] if found.kind == "scheduled" else []
    return "; ".join(done) or by_hand
