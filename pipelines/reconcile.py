"""Flow runs whose process is gone without a word (kill -9, power cut) get their true state: Crashed, resumable.

Prefect marks such runs only when its runner outlives them. We write the owner of a run on it, and look whether that
process is still there. Runs that wait for a person are never touched.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed

from pipelines.services import process_start

logger = logging.getLogger(__name__)

OWNER = "owner:"


def own(flow_run_id: UUID, tags: list[str]) -> None:
    """Write on a flow run that this process runs it."""
    kept = [tag for tag in tags if not tag.startswith(OWNER)]
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run_id, tags=[*kept, OWNER + _identity(os.getpid())])


def reconcile() -> list[UUID]:
    """Mark the runs of dead processes of this machine as Crashed; return their ids."""
    with get_client(sync_client=True) as client:
        running = client.read_flow_runs(flow_run_filter=FlowRunFilter(state={"type": {"any_": ["RUNNING"]}}))
        gone = [flow_run.id for flow_run in running if _is_gone(flow_run)]
        for flow_run_id in gone:
            message = "its process ended without a word; run it again and it resumes"
            client.set_flow_run_state(flow_run_id, Crashed(message=message), force=True)
    return gone


def _is_gone(flow_run: FlowRun) -> bool:
    owners = [tag.removeprefix(OWNER) for tag in flow_run.tags if tag.startswith(OWNER)]
    if not owners:
        return False
    host, boot, pid, _ = owners[0].split("/")
    if host != socket.gethostname():
        return False
    return boot != _boot() or owners[0] != _identity(int(pid))


def _identity(pid: int) -> str:
    return f"{socket.gethostname()}/{_boot()}/{pid}/{process_start(pid)}"


def _boot() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else "unknown"
