"""Flow runs whose process is gone without a word (kill -9, power cut) get their true state: Crashed,
or Cancelled if that was asked for. Either can be run again and resumes.

Prefect marks such runs only when its runner outlives them. We write the owner of a run on it, and look whether that
process is still there. Runs that wait for a person are never touched.
"""

from __future__ import annotations

from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Crashed

from rlhf_core.leases import is_gone
from rlhf_core.tracking import owner


def own(flow_run_id: UUID) -> None:
    """Write on a flow run that this process runs it."""
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run_id, owner.tags())


def reconcile() -> list[UUID]:
    """Mark the runs of dead processes of this machine as Crashed; return their ids."""
    with get_client(sync_client=True) as client:
        active = FlowRunFilter(state={"type": {"any_": ["RUNNING", "CANCELLING"]}})
        gone = [flow_run for flow_run in client.read_flow_runs(flow_run_filter=active) if _is_gone(flow_run)]
        for flow_run in gone:
            cancelling = flow_run.state is not None and flow_run.state.is_cancelling()
            message = "its process ended without a word; run it again and it resumes"
            state = Cancelled(message=message) if cancelling else Crashed(message=message)
            client.set_flow_run_state(flow_run.id, state, force=True)
    return [flow_run.id for flow_run in gone]


def _is_gone(flow_run: FlowRun) -> bool:
    process = owner.from_tags({name: str(value) for name, value in flow_run.labels.items()})
    return process is not None and is_gone(process)
