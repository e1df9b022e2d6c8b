"""Keep a service running: restart it when it dies or hangs, and end it with the process that started it."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Seconds between checks for a death."""
ASK_EVERY_S = 10.0
MISSED_ANSWERS = 4
"""Number of unanswered checks in a row after which a service counts as hung: 40 to 60 s after its last answer."""
START_TIMEOUT_S = 180.0
LONGEST_PAUSE_S = 60.0
STOP_PATIENCE_S = 8.0
KILL_AFTER_S = 4.0
"""Seconds after the end of its patience until the guard of a service is killed itself."""


@dataclass
class Child:
    """A service: its command, its health check, its log file and its process."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    well: Callable[[], bool]
    log: Path
    patience_s: float = STOP_PATIENCE_S
    """Seconds that it may take to end when asked to."""
    listener: socket.socket | None = None
    """The socket at which it listens, which stays open while it is restarted."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = start_guarded(
                self.command, self.environment, log, patience_s=self.patience_s, listener=self.listener
            )

    def dead(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def stop(self) -> None:
        if self.process is not None:
            stop_process(self.process, patience_s=self.patience_s + KILL_AFTER_S)
        if self.listener is not None:
            self.listener.close()

    def kill(self) -> None:
        if self.process is not None:
            kill_family(self.process.pid)
            stop_process(self.process, patience_s=KILL_AFTER_S)


def keep_alive(child: Child, stop: threading.Event) -> None:
    """Restart `child` whenever it ends or hangs, until `stop` is set. It must have been started and answered before.

    The pauses grow if it ends before it has answered again.
    """
    pause_s, answered = LOOK_EVERY_S, True
    while (ailment := _ailment(child, stop, answered=answered)) is not None:
        answered, trouble = ailment
        pause_s = LOOK_EVERY_S if answered else min(2 * pause_s, LONGEST_PAUSE_S)
        logger.warning("%s %s; restarted", child.name, trouble)
        child.kill()
        if not answered and stop.wait(pause_s):
            return
        child.start()
        answered = False


def _ailment(child: Child, stop: threading.Event, *, answered: bool) -> tuple[bool, str] | None:
    """Return whether the child has answered since its start, and what is wrong with it now; None when `stop` is set."""
    missed = 0
    began = last_check = time.monotonic()
    while not stop.wait(LOOK_EVERY_S):
        if child.dead():
            assert child.process is not None
            return answered, f"ended with status {child.process.returncode}"
        if answered and time.monotonic() - last_check < ASK_EVERY_S:
            continue
        last_check = time.monotonic()
        if child.well():
            answered, missed = True, 0
        elif answered or last_check - began > START_TIMEOUT_S:
            missed += 1
        if missed >= MISSED_ANSWERS:
            return answered, f"did not answer {missed} times in a row"
    return None


# ---------------------------------------------------------------- processes


def start_guarded(
    command: list[str],
    environment: Mapping[str, str],
    log: BinaryIO,
    *,
    patience_s: float,
    listener: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process. Ctrl-C reaches only this process, which then stops the command.

    The command has the descriptor of `listener`, under its number here.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "pipelines.services.parent_death_guard", str(patience_s), *command],
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        pass_fds=() if listener is None else (listener.fileno(),),
        start_new_session=True,
    )


def stop_process(process: subprocess.Popen[bytes], *, patience_s: float) -> None:
    """Stop a child with SIGTERM; if it has not ended after `patience_s`, kill it and all its descendants."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            kill_family(process.pid)
            process.wait()
    if process.stdin is not None:
        process.stdin.close()


def kill_family(pid: int) -> None:
    """Kill a process and all its descendants, stopped ones included."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
