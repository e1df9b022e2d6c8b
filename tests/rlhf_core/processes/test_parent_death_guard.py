from __future__ import annotations

import os
import subprocess
import sys
import time

from rlhf_core.processes import parent_death_guard
from rlhf_core.processes.identity import process_stat


def start(script: str) -> tuple[subprocess.Popen[str], int]:
    """Start a shell's script on a leash; return it with the descriptor that holds it."""
    own, held = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", parent_death_guard.__file__, str(own), "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(own,),
        start_new_session=True,
        text=True,
    )
    os.close(own)
    return process, held


def assert_gone(pids: list[int]) -> None:
    """Wait a little for processes to be gone, or dead and not yet collected by whoever adopted them."""
    deadline = time.monotonic() + 20
    while left := [pid for pid in pids if (stat := process_stat(pid)) is not None and stat[0] not in "ZX"]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.02)


def test_a_command_and_what_it_started_end_when_nobody_holds_the_leash() -> None:
    process, held = start("trap '' TERM; sleep 600 & echo $$ $!; wait")
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert pids[0] == process.pid and all(process_stat(pid) is not None for pid in pids)
    os.close(held)
    assert process.wait(20) == -9
    assert_gone(pids)


def test_the_streams_and_the_status_are_the_command_s_own() -> None:
    process, held = start("read line; echo got $line; exit 7")
    # The end of the output is heard although the leash is still held.
    assert process.communicate("it\n", timeout=20) == ("got it\n", None)
    assert process.returncode == 7
    os.close(held)


def test_nothing_is_left_of_a_command_that_has_ended() -> None:
    process, held = start("sleep 600 >/dev/null & echo $!")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.wait(20) == 0 and process_stat(child) is not None  # the leash is for its starter to let go
    os.close(held)
    assert_gone([child])


STARTER = """
import sys, time
from tests.rlhf_core.processes.test_parent_death_guard import start
process, held = start("sleep 600 & echo $$ $!; wait")
print(process.stdout.readline(), flush=True)
time.sleep(600)
"""


def test_a_command_ends_with_its_starter_when_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        starter.kill()
    assert len(pids) == 2
    assert_gone(pids)
