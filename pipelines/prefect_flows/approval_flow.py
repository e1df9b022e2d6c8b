"""Answer what a gate has asked, by a form in Prefect: the deployment `rlhf-pipeline/approve`."""

from __future__ import annotations

from typing import Literal

from prefect import flow

from pipelines.execution.approving import answer_gate
from pipelines.execution.resume import resume
from pipelines.services.flow_runs import FLOW_NAME


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
    request, said = answer_gate(run, gate, decision, reason=reason, artifact=artifact, store=store, by=by)
    waiting = request.links.get("prefect.flow_run_id", "")
    found = resume(waiting, served=True).message if waiting else "run the same command again"
    return f"gate {request.gate}, {request.condition['after']} {request.digest[:12]}: {said}; {found}"
