"""CPU seconds of a process and all its descendants, living ones included; as a command, those of one phase of CI.

    python tests/support/cpu_seconds.py TABLE PHASE COMMAND...   runs a command and appends a line to the table
    python tests/support/cpu_seconds.py TABLE                    prints the table

Linux adds the CPU seconds of an ended process to the parent that waits for it. Some have no such parent: Ray's raylet
ignores SIGCHLD, and a tree of processes that is killed at once ends without waiting. So /proc is read every `EVERY`
seconds, and what vanished without being added to any survivor is kept as of the last look.
Needs the standard library alone: CI calls it before anything is installed. Off Linux only ended children count.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
EVERY = 0.5
"""Seconds between two looks at /proc, each of a millisecond or two."""
LOOKS = 4
"""Looks in a row, each of a millisecond or two, until one shows no process that ended during it."""
PATIENCE = 15.0
"""Seconds that daemons have to end by themselves when their command has ended."""
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Process:
    """What /proc says of one process: its parent, start (clock ticks since boot) and CPU seconds."""

    pid: int
    parent: int
    start: int
    own: float
    ended_children: float

    @property
    def name(self) -> tuple[int, int]:
        """Process id and start: ids are used again."""
        return self.pid, self.start


def _read(pid: int) -> Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, or there is no /proc
        return None
    words = text.rpartition(")")[2].split()  # the name before it may hold spaces; words[0] is field 3 of proc(5)
    own, ended = int(words[11]) + int(words[12]), int(words[13]) + int(words[14])
    return Process(pid, int(words[1]), int(words[19]), own / TICKS, ended / TICKS)


def descendants(pid: int) -> Iterator[Process]:
    """Children, grandchildren and so on of a process; none off Linux."""
    parents = [pid]
    while parents:
        for child in _children(parents.pop()):
            if process := _read(child):
                yield process
                parents.append(child)


def _children(pid: int) -> list[int]:
    """The process ids that the kernel lists for each thread of the parent (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process or a thread has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_bytes().split())
    return found


@dataclass
class CpuClock:
    """Adds up the CPU seconds of this process and its descendants."""

    lost: float = 0.0
    """Seconds, as of the last look before they ended, of processes for which no process of ours waited."""
    _living: dict[tuple[int, int], Process] = field(default_factory=dict)
    """Descendants that lived at the last look, by process id and start; orphans among them still count."""
    _ended_children: float = 0.0
    """Seconds of this process's ended children at the last look."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> float:
        """CPU seconds so far."""
        with self._lock:
            if not self._living and not _has_children():
                self._ended_children = _seconds_of_ended_children()
                return time.process_time() + self._ended_children + self.lost
            return self._look()

    def _look(self) -> float:
        for _ in range(LOOKS):
            # Parents before children, and this process first: who ends during the look is missing rather than counted twice.
            ended_children, living = _seconds_of_ended_children(), self._descendants()
            vanished, added = 0.0, ended_children - self._ended_children
            for name, last in self._living.items():
                if name in living:
                    added += living[name].ended_children - last.ended_children
                else:
                    vanished += last.own + last.ended_children
            if vanished <= added + 1 / TICKS:
                break  # else look again, since a process may have ended while it was looked for
        self.lost += max(0.0, vanished - added)
        self._living, self._ended_children = living, ended_children
        seconds = sum(process.own + process.ended_children for process in living.values())
        return time.process_time() + ended_children + self.lost + seconds

    def _descendants(self) -> dict[tuple[int, int], Process]:
        found = {process.name: process for process in descendants(os.getpid())}
        for name in self._living.keys() - found.keys():
            process = _read(name[0])
            if process is not None and process.name == name:  # an orphan, not another process with the same id
                found[name] = process
                found |= {below.name: below for below in descendants(process.pid)}
        return found


def _seconds_of_ended_children() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def _has_children() -> bool:
    """True if this process has a child, running or not yet waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def run_phase(table: Path, name: str, command: list[str]) -> int:
    """Run a command, append its wall and CPU seconds to the table, and end what it has left running."""
    if sys.platform == "linux":  # orphans become our children, so that their seconds reach us
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began, clock, ended = time.monotonic(), CpuClock(), threading.Event()
    child = subprocess.Popen(command)

    def look() -> None:
        while not ended.wait(EVERY):
            clock.read()

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    status = _wait(child.pid)
    left = _end_the_rest()
    ended.set()
    looker.join()
    seconds = clock.read() - time.process_time()  # without this process, which looks at the others
    row = {"phase": name, "wall": time.monotonic() - began, "cpu": seconds, "status": status}
    with table.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    for line in left:
        print(f"{name}: left running and stopped: {line}", flush=True)
    return status


def _wait(pid: int) -> int:
    """The exit status of a child; orphans that end before it are reaped too."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return abs(os.waitstatus_to_exitcode(status))


def _end_the_rest() -> list[str]:
    """Wait for descendants that still live; stop those that remain, and return their command lines."""
    began, stopped = time.monotonic(), []
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        living = list(descendants(os.getpid()))
        if not living:
            return stopped
        if time.monotonic() - began > PATIENCE:
            for process in living:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    words = Path(f"/proc/{process.pid}/cmdline").read_text(encoding="utf-8", errors="replace")
                    stopped.append(f"{process.pid} {words.replace(chr(0), ' ')[:160]}")
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.1)


def print_table(table: Path) -> None:
    """Print wall and CPU seconds of each phase, and their sums."""
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    print(f"\n{'phase':<24}{'wall s':>9}{'CPU s':>9}")
    for row in rows:
        print(f"{row['phase']:<24}{row['wall']:9.0f}{row['cpu']:9.0f}" + ("" if not row["status"] else "  failed"))
    print(f"{'all':<24}{sum(row['wall'] for row in rows):9.0f}{sum(row['cpu'] for row in rows):9.0f}", flush=True)


def main(words: list[str]) -> int:
    """Run a phase, or print the table."""
    if len(words) == 1:
        print_table(Path(words[0]))
        return 0
    return run_phase(Path(words[0]), words[1], words[2:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
