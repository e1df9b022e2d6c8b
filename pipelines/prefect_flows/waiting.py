"""Runs of deployments that wait for people: written down when they end, run again when people are done."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Scheduled

from pipelines.services.home import Home
from pipelines.services.wait_notes import forget_wait, note_wait, waiting_runs
from rlhf_core.stage.stopping import RunHalted, StageWaiting

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 20.0
CHECK_TIMEOUT_S = 300.0

Check = Callable[[Home, Sequence[str]], Sequence[str]]


def halted(error: RunHalted) -> State[None]:
    """Return the state of a task or flow that waits for people, is blocked, or over budget: its process ends.

    `keep_resuming` runs again what waits.
    """
    return Cancelled(name=error.state, message=str(error))


def note(home: Home, flow_run: FlowRun, error: RunHalted) -> None:
    """Remember what a run of a deployment waits for, in place of what it waited for before.

    Runs that are no deployment's are in a terminal, where the same command goes on.
    """
    if flow_run.deployment_id is None:
        return
    if isinstance(error, StageWaiting) and error.condition:
        note_wait(home, str(flow_run.id), error.condition)
    else:
        forget_wait(home, str(flow_run.id))


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
    """Schedule the waiting runs whose condition is met, as `check` says; return their ids.

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
                forget_wait(home, name)
        resumed = []
        for name in check(home, due) if due else ():
            if _waits(_read(client, name)):  # the check took a while
                state: State[None] = Scheduled(message="people have judged enough")
                client.set_flow_run_state(UUID(name), state, force=True)
                resumed.append(name)
    return resumed


def checked_apart(home: Home, names: Sequence[str], log: Path) -> list[str]:
    """Return those of the runs whose condition is met, found by a process of its own."""
    command = [sys.executable, "-P", "-m", "pipelines.services.wait_notes", *names]
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
    except ObjectNotFound:
        return None
