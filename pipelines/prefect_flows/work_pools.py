"""Run the scheduled runs of a work pool on this machine (`rlhf worker`) with Prefect's process worker.

As under `rlhf up`, dead runs get their true state, and runs that wait for people are resumed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import FlowRun
from prefect.workers import process
from prefect.workers.process import ProcessWorker

from pipelines.prefect_flows.deployments import PATIENT_QUESTIONS, end_children, keep_true
from pipelines.prefect_flows.own_deployments import ensure_pool
from pipelines.services.flow_runs import HOME_LABEL
from pipelines.services.home import Home
from rlhf_core.secrets.redaction import hide_in_logs
from rlhf_core.stage.stopping import terminations

warnings.filterwarnings(
    "ignore", "Type 'PoolWorker' .* will be overridden"
)  # it is a worker of type `process`, as theirs


class PoolWorker(ProcessWorker):
    """A process worker whose runs work in its folder, belong to its state folder, and save when it is stopped."""

    async def run(self, flow_run: FlowRun, configuration: Any, task_status: Any = None) -> Any:
        """Run a flow run in a separate process, and return its exit status."""
        # Before it starts, so that it is ours even if this process ends first.
        await self.client.update_flow_run_labels(flow_run.id, {HOME_LABEL: Home.here().identity})
        configuration.working_dir = configuration.working_dir or Path.cwd()
        return await super().run(flow_run, configuration, task_status)


def serve_pool(home: Home, pool: str, runs_at_once: int) -> None:
    """Run the scheduled runs of a work pool until SIGTERM or Ctrl-C; the pool is created if it does not exist."""
    logging.basicConfig(format="%(asctime)s %(message)s")
    hide_in_logs()
    os.environ["RLHF_HOME"] = str(home.root)  # of the runs, too
    home.prefect.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(home.prefect)  # of Prefect's runner, whose folder in /tmp any other user can make first
    asyncio.run(ensure_pool(pool))
    process.critical_service_loop = partial(process.critical_service_loop, consecutive=PATIENT_QUESTIONS)
    for number in (*terminations(), signal.SIGINT):
        signal.signal(number, lambda *_: end_children("its worker was stopped", alone=False))
    keep_true(home)
    asyncio.run(PoolWorker(work_pool_name=pool, limit=runs_at_once).start())
