from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rlhf_core.processes.child import guarded_process
from tests.rlhf_core.processes.test_parent_death_guard import assert_gone


async def said(*command: str, **environment: str) -> str:
    """Return what a command writes."""
    async with guarded_process(command, environment=environment) as process:
        output, errors = await process.communicate()
    assert process.returncode == 0, errors
    return output.decode().strip()


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def run() -> None:
        script = f"trap '' TERM; sleep 600 & echo $! > {pids}; echo $$ >> {pids}; echo ready; wait"
        async with guarded_process(("sh", "-c", script), environment={}) as process:
            assert process.stdout is not None
            await process.stdout.readline()
            async with asyncio.timeout(0.0):
                await process.wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())
    assert_gone([int(line) for line in pids.read_text().split()])


def test_what_a_command_leaves_running_is_ended_with_its_block(tmp_path: Path) -> None:
    child = asyncio.run(said("sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"))
    assert_gone([int(child)])


def test_our_own_modules_are_not_forced_on_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert asyncio.run(said("sh", "-c", 'echo "$PYTHONSAFEPATH"')) == ""
    monkeypatch.setenv("INHERITED", "kept")
    assert asyncio.run(said("sh", "-c", 'echo "$PYTHONPATH|$INHERITED|$MY_OWN"', MY_OWN="value")) == "|kept|value"
    assert asyncio.run(said("sh", "-c", 'echo "$PYTHONPATH"', PYTHONPATH="/theirs")) == "/theirs"


def test_the_word_python_is_our_own_interpreter() -> None:
    assert asyncio.run(said("python", "-c", "import sys; print(sys.executable)", PATH="")) == sys.executable


def test_a_program_that_is_not_there_is_named_among_its_errors() -> None:
    async def run() -> tuple[bytes, int | None]:
        async with guarded_process(("no-such-program",), environment={}) as process:
            _, errors = await process.communicate()
        return errors, process.returncode

    errors, status = asyncio.run(run())
    assert (status, errors) == (1, b"no-such-program: No such file or directory\n")
