"""Start commands under a guard, and choose how long idle OpenMP threads wait awake.

Trainer and sampler mostly use the same cores in turn, so idle threads must soon sleep. Waking a thread takes longer
than a small operation, though, so they stay awake from one operation of a step to the next.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import BinaryIO

from rlhf_core.processes import guard

LINE_LIMIT = 64 * 2**20
"""Largest number of bytes in a line read from a command."""
OUR_OWN = ("PYTHONPATH", "PYTHONSAFEPATH")
"""Variables that control where our interpreter finds modules; a user's program has its own and must not get these."""


def guarded(command: Sequence[str], descriptor: int) -> list[str]:
    """The command line that runs `command` until the other end of the pipe `descriptor` is closed."""
    return [sys.executable, "-I", "-S", guard.__file__, str(descriptor), *command]


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
            *guarded([program, *command[1:]], own),
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
            guard.kill_group(process)
            await process.wait()
    finally:
        os.close(own)
        os.close(held)


def take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Take over standard output and input as streams.

    Afterwards prints go to standard error, and the input is empty.
    """
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return answers, requests


# ---------------------------------------------------------------- idle threads

SPINS = "30000"
"""Rounds of libgomp's waiting loop: about 0.4 ms on AMD's Zen 4, up to 2 ms on other processors. Its default is 300000."""


def idle_threads(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables for a process; OpenMP reads them when it is loaded. The user's settings have priority.

    >>> idle_threads({})
    {'GOMP_SPINCOUNT': '30000'}
    >>> idle_threads({"OMP_WAIT_POLICY": "PASSIVE"})
    {'OMP_WAIT_POLICY': 'PASSIVE'}
    """
    chosen = {name: environment[name] for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY") if name in environment}
    return chosen or {"GOMP_SPINCOUNT": SPINS}
