import signal
import subprocess
import sys
import time

import pytest

from rlhf_core.store.leases import is_gone
from rlhf_core.tracking import mlflow_client

TELL = """
import pathlib, sys, time
from rlhf_core.tracking import mlflow_client as owner
import json
pathlib.Path(sys.argv[1]).write_text(json.dumps(owner.owner_tags()))
time.sleep(600)
"""


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.services.parent_death_guard", "8", *command], stdin=subprocess.PIPE
    )


def test_it_returns_the_status_of_its_command():
    assert start([sys.executable, "-c", "raise SystemExit(7)"]).wait(30) == 7


def test_the_command_ends_when_its_starter_is_gone(tmp_path):
    import json

    told = tmp_path / "told"
    leash = start([sys.executable, "-c", TELL, str(told)])
    deadline = time.monotonic() + 30
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process = mlflow_client.from_tags(json.loads(told.read_text()))
    assert process is not None and not is_gone(process)
    leash.stdin.close()  # what the kernel does when the starter is killed
    leash.wait(30)
    assert is_gone(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_ignores_the_request_is_ended_when_it_is_terminated(number):
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    leash = subprocess.Popen(
        [sys.executable, "-m", "pipelines.services.parent_death_guard", "1", sys.executable, "-c", stubborn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )
    leash.stdout.readline()
    leash.send_signal(number)
    assert leash.wait(30) == 128 + signal.SIGKILL


def test_what_cleans_up_after_a_command_has_the_time_for_it(tmp_path):
    left = tmp_path / "shared memory"
    left.touch()
    tracker = (
        f"import os, time\nwhile os.getppid() == int(os.environ['OF']): time.sleep(0.02)\nos.unlink({str(left)!r})"
    )
    command = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {tracker!r}], env=os.environ | {{'OF': str(os.getpid())}})"
    assert start([sys.executable, "-c", command]).wait(30) == 0 and not left.exists()
