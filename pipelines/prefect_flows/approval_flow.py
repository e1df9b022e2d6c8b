"""Answer what a gate has asked, by a form in Prefect: the deployment `rlhf-pipeline/approve`."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound

from pipelines.execution.approving import answer_gate
from pipelines.execution.resume import ResumeError, resume
from pipelines.services.flow_runs import FLOW_NAME, own
from rlhf_core.stage.stopping import StageWaiting


@flow(name=FLOW_NAME, flow_run_name="{decision} {gate}", persist_result=False)
def approve(
    run: str,
    gate: str,
    decision: Literal["approve", "reject"],
    reason: str,
    by: str,
    artifact: str = "",
    store: str = "",
) -> str:
    """Approve or reject what a gate holds back; a run of a deployment that waits for it then goes on.

    `run` and `gate` are named in the message of the run that waits. `by` is who decides and `reason` why; both are kept
    with the artifact. `artifact`, the beginning of a digest, is needed only if the gate has asked about several.
    """
    context = FlowRunContext.get()
    if context is not None and context.flow_run is not None:
        own(context.flow_run.id)
    request, said = answer_gate(run, gate, decision, reason=reason, artifact=artifact, store=store, by=by)
    flow_run = request.links["prefect.flow_run_id"] if "prefect.flow_run_id" in request.links else ""
    return f"gate {request.gate}, {request.condition['after']} {request.digest[:12]}: {said}; {go_on(flow_run)}"


def go_on(flow_run: str) -> str:
    """Start the run of a deployment again if it waits; return what comes of it, or what is left to do."""
    by_hand = "run the same command again, and it goes on"
    if not flow_run or not waits(flow_run):
        return by_hand
    try:
        found = resume(flow_run, served=True)
    except ResumeError as error:  # the decision is written down in any case
        return f"{error}; {by_hand}"
    return found.message if found.kind == "scheduled" else by_hand


def waits(flow_run: str) -> bool:
    """Return whether a flow run has ended as Waiting; one that was cancelled or has failed is not started again."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(flow_run)).state
    except (ObjectNotFound, ValueError):
        return False
    return state is not None and state.name == StageWaiting.state
