"""Guard a child process that runs user code: it is killed with all its descendants, and ends with its parent.

Choose how long OpenMP threads that have nothing to do look for work before they sleep.

Trainer and sampler mostly use the same cores in turn, so idle threads must soon sleep. To be woken takes longer than a
small operation, though, so they wait awake as long as it is from one operation of a step to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_core.processes import parent_death_guard

GUARD_LOOKS_EVERY_MS = 1000
KILLING_TIMEOUT_S = 5.0
"""Time limit for killing all descendants; some processes fork as fast as they are killed."""
KILLS_EVERY_S = 0.005

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill `process` (a group leader), its group, and all its descendants, whatever session they are in.

    A surviving process would keep its pipes open.
    """
    if process.returncode is None:  # once reaped, the process id may belong to another process
        _kill_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def start_guard() -> None:
    """Fork: return in the child, which becomes the worker, and stay in the parent as its guard and group leader.

    The guard adopts the worker's orphans. When the worker ends, the guard kills them and ends with the same status;
    when the other end of our standard input is closed, it kills the worker too. The worker dies with the guard.
    The guard is a process and not a thread, because user code may hold the interpreter lock forever. Polling for no
    event reports only the end of the input and leaves its content to the worker.
    """
    guard = os.getpid()
    if os.getpgrp() != guard:  # in another process's group, killing the group would kill more than ours
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
    """Return standard output and input as streams; from then on prints go to standard error, and the input is empty."""
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return answers, requests


def _kill_descendants(pid: int) -> None:
    """Kill all descendants of `pid`, repeatedly until none is alive, for at most 5 s."""
    deadline = time.monotonic() + KILLING_TIMEOUT_S
    while (living := _descendants(pid)) and time.monotonic() < deadline:
        for one in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(KILLS_EVERY_S)


def _descendants(pid: int) -> list[int]:
    """Return the living descendants of `pid`."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            state, parent = file.read_bytes().rpartition(b")")[2].split()[:2]  # the process name may contain anything
            if state not in (b"Z", b"X"):
                children[int(parent)].append(int(file.parent.name))
    found = [pid]
    for one in found:
        found += children[one]
    return found[1:]


def _reap_orphans(worker: int) -> None:
    """Reap adopted processes that have ended, but not the worker, whose status is still needed."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (one := os.waitid(os.P_ALL, 0, look)) is not None and one.si_pid != worker:
        os.waitpid(one.si_pid, 0)


def _end_as(status: int) -> None:
    """End this process with the given wait status of another process."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL, which cannot be caught anyway
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


# ---------------------------------------------------------------- guarded

LINE_LIMIT = 64 * 2**20
"""Largest number of bytes in a line read from a command."""
OUR_OWN = ("PYTHONPATH", "PYTHONSAFEPATH")
"""Variables that control where our interpreter finds modules; a user's program has its own and must not get these."""


@contextlib.asynccontextmanager
async def guarded_process(
    command: Sequence[str], *, environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `command` with pipes for its streams; if it cannot be started, the reason is in its standard error (status 1).

    `python` as the first word means the current interpreter. `OUR_OWN` variables are not passed on.
    """
    own, held = os.pipe()
    inherited = {name: value for name, value in os.environ.items() if name not in OUR_OWN}
    program = sys.executable if command[0] == "python" else command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(parent_death_guard.__file__)), str(own), program, *command[1:]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited | dict(environment),
            pass_fds=(own,),
            start_new_session=True,
            limit=LINE_LIMIT,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    finally:
        os.close(own)
        os.close(held)


# ---------------------------------------------------------------- idle threads

SPINS = "30000"
"""Rounds of libgomp's waiting loop: about 0.4 ms on AMD's Zen 4, up to 2 ms on other processors. Its default is 300000."""


def idle_threads(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a process; OpenMP reads them when it is loaded. The user's own choice goes first.

    >>> idle_threads({})
    {'GOMP_SPINCOUNT': '30000'}
    >>> idle_threads({"OMP_WAIT_POLICY": "PASSIVE"})
    {'OMP_WAIT_POLICY': 'PASSIVE'}
    """
    chosen = {name: environment[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in environment}
    return chosen or {"GOMP_SPINCOUNT": SPINS}
