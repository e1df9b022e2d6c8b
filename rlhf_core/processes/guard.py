"""Guard a process: it is killed with all its descendants when its starter ends, for any reason.

The guard is the parent and subreaper of the process, so it also finds descendants that moved to other sessions. It is a
process and not a thread, because user code may hold the interpreter lock forever. It can be started in two ways:

- `start_guard()` forks a Python worker of ours, whose starter holds the other end of its standard input.
- `python -I -S guard.py DESCRIPTOR COMMAND ...` runs any command, whose starter holds the other end of the pipe
  DESCRIPTOR. It needs only the standard library, so it starts in milliseconds and under any interpreter.

Either must be the first process of a new session.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

# To import `pathlib` and `typing` would take a third of a start.
# ruff: noqa: PTH110, PTH123, PTH208
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class GroupLeader(Protocol):
        """A process such as `subprocess.Popen`, whose id is valid as long as `returncode` is None."""

        @property
        def pid(self) -> int: ...

        @property
        def returncode(self) -> int | None: ...


GUARD_LOOKS_EVERY_MS = 1000  # for orphans that have ended
KILLING_TIMEOUT_S = 5.0
"""Time limit for killing all descendants; some processes fork as fast as they are killed."""
KILLS_EVERY_S = 0.005  # until no descendant is left: some start others meanwhile
KERNEL_LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
"""An option of the kernel, which most distributions set."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # in linux/prctl.h


def run_command(descriptor: int, command: list[str]) -> None:
    """Run `command` under a guard; exit with status 1 and an error if it cannot be started."""
    start_guard(descriptor, silent=True)
    os.close(descriptor)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


def start_guard(held: int = 0, *, silent: bool = False) -> None:
    """Fork: return in the child, which becomes the worker, and stay in the parent as its guard and group leader.

    The guard adopts the worker's orphans. When the worker ends, the guard kills them and ends with the same status;
    when the other end of the descriptor `held` is closed, it kills the worker too. The worker dies with the guard.
    A `silent` guard closes its standard streams, so that a reader sees the end of the worker's own output.
    """
    guard = os.getpid()
    if os.getpgrp() != guard:  # in another process's group, killing the group would kill more than ours
        return
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    worker = os.fork()
    if worker == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        return
    for stream in (0, 1, 2) if silent else ():
        os.close(stream)
    ended = os.pidfd_open(worker)
    poll = select.poll()
    poll.register(held, 0)  # for no event: only the end of the input is reported, and its content left to the worker
    poll.register(ended, select.POLLIN)
    while not (events := poll.poll(GUARD_LOOKS_EVERY_MS)):
        _reap_orphans(worker)
    _kill_descendants(guard)
    if ended not in dict(events):
        os.killpg(0, signal.SIGKILL)
    _end_as(os.waitpid(worker, 0)[1])


def kill_group(process: GroupLeader) -> None:
    """Kill `process` (a group leader), its group, and all its descendants, which may be in other sessions.

    A surviving process would keep its pipes open.
    """
    if process.returncode is None:  # once reaped, the process id may belong to another process
        _kill_descendants(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _kill_descendants(pid: int) -> None:
    """Kill all descendants of `pid`, repeatedly until none is alive, for at most 5 s."""
    deadline = time.monotonic() + KILLING_TIMEOUT_S
    while (living := _descendants(pid)) and time.monotonic() < deadline:
        for one in living:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        time.sleep(KILLS_EVERY_S)


def _descendants(pid: int) -> list[int]:
    """Process ids of living descendants."""
    found = [pid]
    for one in found:
        found += _children(one)
    return [one for one in found[1:] if _state_and_parent(one)[0] not in "ZX"]


def _children(pid: int) -> list[int]:
    """Children of all threads of a process; a look at all processes where the kernel has no such lists."""
    if not KERNEL_LISTS_CHILDREN:
        present = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        return [one for one in present if _state_and_parent(one)[1] == pid]
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as children:
                found += map(int, children.read().split())
    return found


def _state_and_parent(pid: int) -> tuple[str, int]:
    """State of a process, which is "X" (dead) once it is gone, and its parent's id."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read()
    except OSError:
        return "X", 0
    state, parent = stat.rpartition(")")[2].split()[:2]  # the process name may contain anything
    return state, int(parent)


def _reap_orphans(worker: int) -> None:
    """Reap adopted processes that have ended, but not the worker, whose status is still needed."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while (one := os.waitid(os.P_ALL, 0, look)) is not None and one.si_pid != worker:
        os.waitpid(one.si_pid, 0)


def _end_as(status: int) -> None:
    """End this process with the given wait status of another process."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL, which cannot be caught anyway
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    run_command(int(sys.argv[1]), sys.argv[2:])
