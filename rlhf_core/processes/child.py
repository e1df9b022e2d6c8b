"""A child process for code of users: it is killed with all that it started, and ends with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, BinaryIO

GUARD_LOOKS_EVERY_MS = 1000
KILLING_TIMEOUT_S = 5.0
"""For processes to be gone; some fork as fast as they are killed."""
KILLS_EVERY_S = 0.005

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill `process`, the first of its group, its group, and all that it started, in whatever session that hides.

    One that lives on would hold its pipes open.
    """
    if process.returncode is None:  # once reaped, the number may be another process's
        _kill_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def start_guard() -> None:
    """Fork: return in the child, which goes on as the worker, and stay behind as its guard, the first of our group.

    What the worker started and left alone becomes the guard's. When the worker ends, the guard kills all of that and ends as
    the worker did; when nobody holds the other end of our input any more, it kills the worker too. The worker dies with it.
    A process and not a thread: a user's code may hold the interpreter lock for ever. Polling for nothing reports the end
    of the input alone and leaves what is in it to the worker.
    """
    guard = os.getpid()
    if os.getpgrp() != guard:  # in a group of somebody else's there would be more to kill
        return
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        return
    ended = os.pidfd_open(worker)
    poll = select.poll()
    poll.register(0, 0)
    poll.register(ended, select.POLLIN)
    while not (events := poll.poll(GUARD_LOOKS_EVERY_MS)):
        _reap_orphans(worker)
    _kill_descendants(guard)
    if ended not in dict(events):
        os.killpg(0, signal.SIGKILL)
    _end_as(os.waitpid(worker, 0)[1])


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return our ends of output and input: from now on what is printed goes to standard error, and there is no input."""
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return answers, requests


def _kill_descendants(pid: int) -> None:
    """Kill all that `pid` started, directly or not, again and again until none of them lives, for at most 5 s."""
    deadline = time.monotonic() + KILLING_TIMEOUT_S
    while (living := _descendants(pid)) and time.monotonic() < deadline:
        for one in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(KILLS_EVERY_S)


def _descendants(pid: int) -> list[int]:
    """Return the processes that live below `pid`."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, parent = file.read_bytes().rpartition(b")")[2].split()[:2]  # its name may hold anything
            if state not in (b"Z", b"X"):
                children[int(parent)].append(int(file.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found[1:]


def _reap_orphans(worker: int) -> None:
    """Let go of what became ours and has ended; the worker's status is still wanted."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (one := os.waitid(os.P_ALL, 0, look)) is not None and one.si_pid != worker:
        os.waitpid(one.si_pid, 0)


def _end_as(status: int) -> None:
    """End this process with the wait status of another."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL, which cannot be caught anyway
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))
