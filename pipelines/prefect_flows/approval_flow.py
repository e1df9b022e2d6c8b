"""Answer what a gate has asked, by a form in Prefect: the deployment `rlhf-pipeline/approve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound

from pipelines.execution.approving import Meant, answer_gate
from pipelines.execution.resume import ResumeError, resume
from pipelines.services.flow_runs import FLOW_NAME, own
from rlhf_core.stage.stopping import StageWaiting

FLOW_RUN = "prefect.flow_run_id"


@flow(name=FLOW_NAME, flow_run_name="{decision} {gate}", persist_result=False)
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
    """Approve or reject what a gate holds back; a run of a deployment that waits for it then goes on.

    `run` and `gate` are named in the message of the run that waits. `by` is who decides and `reason` why; both are kept
    with the question. `question`, the id in that message, is needed only if the gate has asked several; `artifact` is the
    beginning of a digest.
    """
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        own(context.flow_run.id)
    meant = Meant(run, gate, artifact=artifact, question=question)
    request, said = answer_gate(meant, decision, reason=reason, store=store, by=by)
    asked = request.question
    flow_runs = [one.links[FLOW_RUN] for one in request.askers if FLOW_RUN in one.links]
    return f"gate {asked.gate}, {asked.condition['after']} {asked.digest[:12]}: {said}; {go_on(flow_runs)}"


def go_on(flow_runs: Sequence[str]) -> str:
    """Start again those of the runs that are of a deployment and wait; return what comes of it, or what is left to do."""
    by_hand, done = "run the same command again, and it goes on", []
    for flow_run in dict.fromkeys(flow_runs):
        if not waits(flow_run):
            continue
        try:
            found = resume(flow_run, served=True)
        except ResumeError as error:  # the decision is written down in any case
            done.append(f"{error}; {by_hand}")
        else:
            done += [found.message] if found.kind == "scheduled" else []
    return "; ".join(done) or by_hand


def waits(flow_run: str) -> bool:
    """Return whether a flow run has ended as Waiting; one that was cancelled or has failed is not started again."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run)).state
    except (ObjectNotFound, ValueError):
        return False
    return state is not None and state.name == StageWaiting.state
