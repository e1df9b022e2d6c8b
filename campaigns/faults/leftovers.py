"""Find processes of any session that outlive the fault for which they were started."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from campaigns.faults.fault import Outcome
from rlhf_contrib.sandbox import local as sandbox
from rlhf_core.processes.warm import end_warm_parent

MARK = "RLHF_FAULT"
GONE_S = 10.0
"""Seconds for processes to end after their owner was closed."""
INTO_IT_S = 1.0


class Watch:
    """Identifies processes by an environment variable, and the sandbox, which clears variables, by its folder."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._before = set(_sandboxed())

    def living(self) -> list[psutil.Process]:
        """The living processes that belong to this watch, without this process."""
        found = [one for one in psutil.process_iter() if one.pid != os.getpid() and self._is_marked(one)]
        return found + [one for one in _sandboxed() if one not in self._before]

    def left(self) -> list[psutil.Process]:
        """List the processes that do not end within 10 s, and kill them, so that the next fault starts clean."""
        end_warm_parent()
        _, alive = psutil.wait_procs(self.living(), timeout=GONE_S)
        left = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return left

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            return False


@contextlib.contextmanager
def watched() -> Iterator[Watch]:
    """Mark all processes that are started inside of the block."""
    end_warm_parent()  # /proc shows a fork's variables from the start of its parent
    before = os.environ.get(MARK)
    os.environ[MARK] = secrets.token_hex(8)
    try:
        yield Watch(os.environ[MARK])
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


def end_with_the_run(program: str, *arguments: str) -> Outcome:
    """Kill a run (the Python `program`) a second after it has printed a line; all its descendants must end, too."""
    with watched() as watch, subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=-1, text=True) as run:
        assert run.stdout is not None
        run.stdout.readline()
        time.sleep(INTO_IT_S)
        started = watch.living()
        run.kill()
        began = time.monotonic()
        run.wait()
        left = watch.left()
        took = time.monotonic() - began
    if len(started) < 2 or left:
        return Outcome("not handled", None, None, f"of {len(started)} processes {len(left)} are left over")
    return Outcome("recovered", took, 0.0, f"the {len(started) - 1} processes that it had started ended with the run")


def _sandboxed() -> list[psutil.Process]:
    """The sandboxed programs, and their launchers."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            if str(sandbox.LAUNCHER) in process.cmdline() or process.environ().get("HOME", "").startswith(
                sandbox.FOLDER
            ):
                found.append(process)
    return found
