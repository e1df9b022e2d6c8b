"""A child process for code of users: it is killed with all that it started, and outlives nobody who started it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from typing import Any, BinaryIO

GUARD_LOOKS_EVERY_MS = 1000


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill `process`, the first of its group, and its children: one that lives on would hold its pipes open."""
    if process.returncode is None:  # once reaped, the number may be another process's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def start_guard() -> None:
    """Fork a process that kills our group when nobody holds the other end of our input any more, or when we are gone.

    A process and not a thread: a user's code may hold the interpreter lock for ever. Polling for nothing reports the end
    of the input alone and leaves what is in it to us.
    """
    worker = os.getpid()
    if os.getpgrp() != worker or os.fork() != 0:  # in a group of somebody else's there would be more to kill
        return
    for descriptor in (1, 2):  # or a reader would wait for us to end
        os.close(descriptor)
    poll = select.poll()
    poll.register(0, 0)
    while not poll.poll(GUARD_LOOKS_EVERY_MS) and os.getppid() == worker:
        continue
    os.killpg(0, signal.SIGKILL)


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return our ends of output and input: from now on what is printed goes to standard error, and there is no input."""
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return answers, requests
