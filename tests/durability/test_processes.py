from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.durability import processes


def fail() -> None:
    raise ValueError("as it should")


def test_the_end_of_a_child_is_told(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert processes.run(lambda: None, log).how == "completed"
    assert processes.run(fail, log).how == "failed"
    assert "ValueError: as it should" in log.read_text()
    ended = processes.run(partial(time.sleep, 30), log, kill_after_s=0.05)
    assert ended.how == "killed" and ended.seconds < 5.0


WATCH = """
import subprocess, sys
from pathlib import Path
from benchmarks.durability import processes

def leave_an_orphan():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(SECONDS)"], start_new_session=True)

processes.adopt_orphans()
processes.run(leave_an_orphan, Path(sys.argv[1]))
ended = processes.finish(processes.start(leave_an_orphan, Path(sys.argv[1])), kill_after_s=None)
print(processes.wait_for_family(within_s=1.5))
"""


def watch(seconds: float, log: Path) -> str:
    # In a process of its own: this one has children of other tests.
    command = [sys.executable, "-c", WATCH.replace("SECONDS", str(seconds)), str(log)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_an_orphan_that_ends_by_itself_is_waited_for(tmp_path: Path) -> None:
    assert watch(0.2, tmp_path / "log").endswith(", ())\n")


def test_an_orphan_that_stays_is_named(tmp_path: Path) -> None:
    assert "time.sleep(4)" in watch(4, tmp_path / "log")
