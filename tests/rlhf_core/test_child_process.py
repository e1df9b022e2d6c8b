from __future__ import annotations

import subprocess
import sys

from rlhf_core.child_process import kill_group

PROGRAM = """
import subprocess, sys, time
from rlhf_core.child_process import start_guard, take_standard_streams
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
