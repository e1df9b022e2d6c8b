from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from rlhf_core.processes.child import kill_group
from tests.rlhf_core.processes.test_parent_death_guard import assert_gone

PROGRAM = """
import subprocess, sys, time
from rlhf_core.processes.child import start_guard, take_standard_streams
start_guard()
answers, requests = take_standard_streams()
child = subprocess.Popen(["sleep", "60"])
print("noise")
answers.write(f"{child.pid} {sys.stdin.read()!r}\\n".encode())
answers.flush()
while True:  # whatever happens to our input
    time.sleep(1)
"""


def started() -> tuple[subprocess.Popen[bytes], bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline()


def test_the_guard_ends_the_process_and_its_children_when_nobody_holds_its_input() -> None:
    process, line = started()
    assert line.endswith(b" ''\n")  # what it prints goes elsewhere, and what it reads is empty
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    assert process.wait(timeout=20) == -9
    assert process.stdout.read() == b""  # at its end: the child, which holds it too, is gone
    process.stdout.close()


def test_killing_the_group_ends_the_children_too() -> None:
    process, _ = started()
    kill_group(process)
    assert process.wait(timeout=20) == -9
    kill_group(process)  # its number may be another one's by now: nobody is killed
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.read() == b""
    process.stdout.close()
    process.stdin.close()


ESCAPING = """
import os, signal, subprocess, sys, time
from rlhf_core.processes.child import start_guard, take_standard_streams
start_guard()
answers, requests = take_standard_streams()
there = subprocess.Popen(["sleep", "60"], start_new_session=True)
if os.fork() == 0:  # and one whose parent is gone
    orphan = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.write(answers.fileno(), f"{there.pid} {orphan.pid}\\n".encode())
    os._exit(0)
os.wait()
requests.readline()
exec(sys.argv[1])
"""


def escaped(end: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start a worker that ends by `end` once it is told to; return it with two children that left its session."""
    process = subprocess.Popen(
        [sys.executable, "-c", ESCAPING, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize(
    ("end", "status"),
    [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.abort()", -signal.SIGABRT), ("sys.exit(0)", 0)],
)
def test_a_worker_that_ends_takes_along_all_that_it_started_and_its_status_is_told(end: str, status: int) -> None:
    process, children = escaped(end)
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.read() == b"" and process.wait(timeout=20) == status
    assert_gone(children)


def test_no_session_hides_a_child_from_a_kill_or_from_the_end_of_the_input() -> None:
    for kill in (True, False):
        process, children = escaped("time.sleep(60)")
        with process:
            assert process.stdin is not None
            if kill:
                kill_group(process)
            process.stdin.close()
            assert process.wait(timeout=20) == -9
        assert_gone(children)


def test_the_worker_dies_with_its_guard() -> None:
    process, children = escaped("time.sleep(60)")
    with process:
        process.kill()
        assert process.stdout is not None and process.stdout.read() == b""  # its other holder is gone
    for child in children:  # nobody is left who could know of them
        subprocess.run(["kill", str(child)], check=True)
