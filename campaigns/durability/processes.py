"""Fork children, kill them, and find the processes that remain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

HUNG_AFTER_S = 900.0
GONE_WITHIN_S = 15.0
"""Seconds. A reward function's process may still be importing when its parent dies; it ends at its next read."""
_PR_SET_CHILD_SUBREAPER = 36

End = Literal["completed", "killed", "failed", "hung"]

_STARTED: set[int] = set()
"""Children that were started here and not yet waited for."""
_BYSTANDERS: set[psutil.Process] = set()
"""Processes that already ran below this one before the first child started, such as a server of the tests."""


@dataclass(frozen=True)
class Ended:
    """How a child ended, after how many seconds, and how long its descendants outlived it.

    `survivors` are the command lines of descendants that did not end in time and were killed.
    """

    how: End
    seconds: float
    lingered_s: float
    survivors: tuple[str, ...]


def adopt_orphans(*, adopt: bool = True) -> None:
    """Make this process the parent of orphaned descendants, so that it can find all of them."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def start(work: Callable[[], None], log: Path) -> int:
    """Run `work` in a forked child with a new session and its output in `log`; returns its process id."""
    sys.stdout.flush()
    if not _STARTED:
        _BYSTANDERS.clear()
        _BYSTANDERS.update(psutil.Process().children(recursive=True))
    child = os.fork()
    if child:
        _STARTED.add(child)
        return child
    _STARTED.clear()
    status = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        work()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the exit handlers inherited from the parent


def finish(child: int, *, kill_after_s: float | None) -> tuple[End, float]:
    """Wait for the child, killing its whole group after `kill_after_s`; returns how it ended and after how long."""
    began = time.monotonic()
    deadline = began + (HUNG_AFTER_S if kill_after_s is None else kill_after_s)
    status = _wait(child, deadline)
    late = status is None
    if status is None:
        _kill_group(child)
        status = os.waitpid(child, 0)[1]
    _STARTED.discard(child)
    seconds = time.monotonic() - began
    if late and kill_after_s is None:
        return "hung", seconds
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return "killed", seconds
    return ("completed" if status == 0 else "failed"), seconds


def wait_until_stopped(child: int, *, stop_after_s: float | None) -> bool:
    """Wait until the child stops itself, or stop its whole group after this many seconds; False if it ended first."""
    deadline = time.monotonic() + (HUNG_AFTER_S if stop_after_s is None else stop_after_s)
    while True:
        seen = os.waitid(os.P_PID, child, os.WEXITED | os.WSTOPPED | os.WNOWAIT | os.WNOHANG)
        if seen is not None:
            return seen.si_code == os.CLD_STOPPED
        if time.monotonic() >= deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGSTOP)
            deadline = float("inf")
        time.sleep(0.005)


def has_ended(child: int) -> bool:
    """Whether a child has ended; `finish` can still report how."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def run(work: Callable[[], None], log: Path, *, kill_after_s: float | None = None) -> Ended:
    """Run `work` in a child to its end, and wait until its descendants are gone."""
    how, seconds = finish(start(work, log), kill_after_s=kill_after_s)
    return Ended(how, seconds, *wait_for_family())


def wait_for_family(*, within_s: float = GONE_WITHIN_S) -> tuple[float, tuple[str, ...]]:
    """Wait until only the processes from before the first `start` remain below this one.

    Returns the seconds, and the command lines of processes that did not end in time and were killed.
    """
    began = time.monotonic()
    while True:
        _reap()
        left = [process for process in _family(recursive=True) if _is_alive(process)]
        waited = time.monotonic() - began
        if not left:
            return waited, ()
        if waited > within_s:
            names = tuple(sorted(_command(process) for process in left))
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=10)
            return waited, names
        time.sleep(0.02)


def _wait(child: int, deadline: float) -> int | None:
    """The wait status of a child, or None if it is alive at the deadline."""
    pause = 0.001
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(left, pause))
        pause = min(2 * pause, 0.02)


def _reap() -> None:
    """Record the deaths of adopted processes."""
    for process in _family(recursive=False):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def _family(*, recursive: bool) -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=recursive) if process not in _BYSTANDERS]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:6]) or process.name()
    except psutil.NoSuchProcess:
        return "gone"


def _kill_group(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it may not have made its session yet
        os.kill(child, signal.SIGKILL)
