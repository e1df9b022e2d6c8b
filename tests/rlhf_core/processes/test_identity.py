import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from rlhf_core.processes.identity import here, is_running, process_stat, process_state


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def started(pid: int) -> int:
    found = process_stat(pid)
    return found[1]


def state_after(number: int, process: subprocess.Popen[bytes], wanted: str) -> str:
    """Return the state once it is `wanted`, or after 5 s."""
    since = started(process.pid)
    process.send_signal(number)
    deadline = time.monotonic() + 5
    while process_state(process.pid, since) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return process_state(process.pid, since)


def test_a_process_is_alive_then_stopped_then_gone_even_before_its_parent_asks(child):
    assert process_state(child.pid, started(child.pid)) == "alive"
    assert state_after(signal.SIGSTOP, child, "stopped") == "stopped"
    assert state_after(signal.SIGKILL, child, "gone") == "gone"  # a zombie


def test_another_process_with_the_same_number_is_not_the_one_that_is_meant(child):
    assert process_state(child.pid, started(child.pid) - 1) == "gone"


def test_a_number_that_nobody_has_is_not_running():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert is_running(os.getpid())
    assert not is_running(ended.pid)


def test_this_machine_is_the_same_for_all_its_processes():
    program = "from rlhf_core.processes.identity import here; print(here())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == str(here())
