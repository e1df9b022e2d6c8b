"""Start commands that are killed, with their process group, at the end of their `with` block or of this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from rlhf_core.processes import parent_death_guard

LINE_LIMIT = 64 * 2**20
"""Largest number of bytes in a line read from a command."""
OUR_OWN = ("PYTHONPATH", "PYTHONSAFEPATH")
"""Variables that control where our interpreter finds modules; a user's program has its own and must not get these."""


@contextlib.asynccontextmanager
async def guarded_process(
    command: Sequence[str], *, environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start `command` with pipes for its streams; if it cannot be started, its standard error says so (status 1).

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
