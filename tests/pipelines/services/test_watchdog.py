import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipelines.services import servers
from pipelines.services.running import wait_for
from pipelines.services.servers import Child, keep_alive

SERVE = """
import os, sys, time
while True:
    with open(sys.argv[1] + ".part", "w") as part:
        part.write(f"{os.getpid()} {time.time()}")
    os.replace(sys.argv[1] + ".part", sys.argv[1])
    time.sleep(0.05)
"""


def told(file: Path) -> tuple[int, float]:
    """The process that wrote the file last, and when; (0, 0) before any did."""
    if not file.exists():
        return 0, 0.0
    pid, when = file.read_text().split()
    return int(pid), float(when)


def at_work(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(autouse=True)
def hasty(monkeypatch) -> None:
    for name, seconds in (("LOOK_EVERY_S", 0.05), ("ASK_EVERY_S", 0.2), ("LONGEST_PAUSE_S", 0.2)):
        monkeypatch.setattr(servers, name, seconds)


@contextmanager
def kept(command: list[str], file: Path) -> Iterator[Child]:
    child = Child("toy", command, os.environ, lambda: time.time() - told(file)[1] < 1.0, file.with_suffix(".log"))
    child.start()
    wait_for(child.well, 20)
    stop = threading.Event()
    keeper = threading.Thread(target=keep_alive, args=(child, stop))
    keeper.start()
    try:
        yield child
    finally:
        stop.set()
        keeper.join()
        child.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_service_that_dies_or_hangs_is_started_again_and_the_old_one_is_gone(tmp_path, number):
    file = tmp_path / "told"
    with kept([sys.executable, "-c", SERVE, str(file)], file):
        assert wait_for(lambda: told(file)[0] > 0, 20)
        first = told(file)[0]
        os.kill(first, number)
        assert wait_for(lambda: told(file)[0] not in (0, first), 20)
        assert wait_for(lambda: not at_work(first), 5)
    assert wait_for(lambda: not at_work(told(file)[0]), 5)


def test_a_service_whose_leash_was_killed_does_not_stay_behind(tmp_path):
    file = tmp_path / "told"
    with kept([sys.executable, "-c", SERVE, str(file)], file) as child:
        assert wait_for(lambda: told(file)[0] > 0, 20)
        first = told(file)[0]
        os.kill(child.process.pid, signal.SIGKILL)
        assert wait_for(lambda: told(file)[0] not in (0, first), 20)
        assert not at_work(first)


def test_a_service_that_never_gets_well_is_started_again_after_pauses(tmp_path):
    count = tmp_path / "count"
    tally = "import sys; open(sys.argv[1], 'a').write('x')"
    child = Child("toy", [sys.executable, "-c", tally, str(count)], os.environ, lambda: False, tmp_path / "log")
    child.start()
    stop = threading.Event()
    keeper = threading.Thread(target=keep_alive, args=(child, stop))
    keeper.start()
    try:
        assert wait_for(lambda: count.exists() and len(count.read_text()) >= 3, 20)
    finally:
        stop.set()
        keeper.join()
        child.stop()


def test_a_missed_answer_or_two_is_not_a_hang(tmp_path):
    answers = [True, False, False, True, False, False, True]
    stop = threading.Event()

    def well() -> bool:
        if not answers:
            stop.set()
            return True
        return answers.pop(0)

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    child = Child("toy", command, os.environ, well, tmp_path / "log")
    child.start()
    first = child.process.pid
    keep_alive(child, stop)
    assert child.process.pid == first and answers == []
    child.stop()
