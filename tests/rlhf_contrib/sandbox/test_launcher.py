"""The conversation with the launcher, without what shuts a program in: see test_local.py for that."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_contrib.sandbox.local import LAUNCHER, find_isolation
from tests.support.process_state import assert_gone


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-I", "-S", str(LAUNCHER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder that nobody in particular can enter."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def ask(launcher: subprocess.Popen[str], work: Path, program: str, **changes: Any) -> None:
    """Ask for `program` with resource limits alone; the input stays open."""
    spec = {
        "mode": "none",
        "python": find_isolation(allow_network=True).python,
        "program": program,
        "stdin": "",
        "work": str(work),
        "hidden": [],
        "timeout_s": 20.0,
        "wall_s": 100.0,
        "memory_bytes": 2**30,
        "processes": 64,
        "file_bytes": 2**20,
        "open_files": 64,
        "output_bytes": 1000,
    }
    launcher.stdin.write(json.dumps(spec | changes) + "\n")
    launcher.stdin.flush()


def answer(launcher: subprocess.Popen[str]) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(launcher.stdout.read())
    return said


def test_it_says_how_the_program_ended_and_what_it_wrote(launcher, work):
    ask(launcher, work, "import sys\nsys.stderr.write('note')\nprint(input())\nsys.exit(3)", stdin="line\n")
    assert answer(launcher) == {"outcome": "finished", "status": 3, "stdout": "line\n", "stderr": "note"}


def test_output_is_cut_where_it_was_told(launcher, work):
    ask(launcher, work, "import time\nprint('x' * 5000, flush=True)\ntime.sleep(20)", output_bytes=10)
    said = answer(launcher)
    assert (said["outcome"], said["stdout"]) == ("output", "x" * 10)


def test_a_program_that_cannot_be_started_is_refused_with_the_reason(launcher, work):
    ask(launcher, work, "print(1)", python="/no/such/python")
    said = answer(launcher)
    assert said["outcome"] == "refused" and "FileNotFoundError" in said["detail"]


def test_the_program_and_what_it_started_end_when_nobody_waits_for_the_answer(launcher, work):
    program = """
import os, time
child = os.fork()
if child == 0:
    os.setsid()
else:
    open("half", "w").write(f"{os.getpid()} {child}")
    os.rename("half", "pids")
time.sleep(60)
"""
    ask(launcher, work, program)
    while not (work / "pids").exists():
        assert launcher.poll() is None  # it has ended at the program's deadline, at the latest
        time.sleep(0.02)
    pids = [int(word) for word in (work / "pids").read_text().split()]
    launcher.stdin.close()
    assert launcher.wait(20) == 1 and launcher.stdout is not None and launcher.stdout.read() == ""
    assert_gone(pids)
