"""Measure the memory of a command with all its descendants, and kill them together.

python -m benchmarks.processes make demo
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_EVERY_S = 2.0
STOPPED_WITHIN_S = 5.0


@dataclass
class Watched:
    """A finished command: seconds, and the largest sum of the proportional set sizes of all processes, in bytes."""

    status: int
    seconds: float
    peak_bytes: int


def run_watched(command: Sequence[str], environment: dict[str, str]) -> Watched:
    """Run `command` to its end. A page that several processes share counts once."""
    began, peak = time.monotonic(), 0
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        peak = max(peak, sum(_proportional_bytes(one) for one in family(process.pid)))
        time.sleep(SAMPLE_EVERY_S)
    return Watched(process.returncode, time.monotonic() - began, peak)


def family(pid: int) -> list[psutil.Process]:
    """The process and all of its descendants."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_family(pid: int) -> int:
    """Send SIGKILL to the process and all of its descendants at once; returns their number."""
    processes = family(pid)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)
    return len(processes)


def stop_family(pid: int) -> None:
    """Send SIGSTOP to the process and all of its descendants, including processes that are just being started."""
    deadline = time.monotonic() + STOPPED_WITHIN_S
    while running := [process for process in family(pid) if not _stands_still(process)]:
        if time.monotonic() > deadline:
            return  # it waits in the kernel for a child that was stopped while starting
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(0.01)


def wake_family(pid: int) -> None:
    """Send SIGCONT to the process and all of its descendants."""
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def _stands_still(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _proportional_bytes(process: psutil.Process) -> int:
    """The memory of a process; shared pages count proportionally (the kernel's own sum, which is cheap to read)."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0
    kilobytes = next(line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return int(kilobytes) * 1024


def main() -> int:
    """Run the command of the arguments; print its time and its memory."""
    run = run_watched(sys.argv[1:], dict(os.environ))
    print(f"{run.seconds:.1f} s wall, {run.peak_bytes / 2**30:.2f} GiB at most over all processes, status {run.status}")
    return run.status


if __name__ == "__main__":
    sys.exit(main())
