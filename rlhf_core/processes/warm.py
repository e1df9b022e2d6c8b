"""Start Python workers as forks of a warm parent: in milliseconds instead of a third of a second of imports.

The warm parent (`rlhf_core.processes.warm_parent`) starts with the first worker and ends with this process. A fork equals a
fresh process, because the parent serves only as long as nothing has changed that a new process would inherit from us, such
as the working folder or the limits, and that the interpreter or a library reads when it starts. After a change, another
parent replaces it. All other variables and the standard streams are set in the fork.

The parent reaps a worker only when we ask for it, so that the process id stays valid as with `subprocess.Popen`. If the
parent is killed, its workers continue, and the next worker has a new parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rlhf_core.processes.host import PipedProcess, start_command
from rlhf_core.processes.warm_parent import REFUSED, REQUEST_BYTES

REPLY_TIMEOUT_S = 60.0
"""Seconds for the interpreter and its imports on a busy machine. A parent that user code has stopped is replaced
then."""
REPLY_BYTES = 64
COMMAND_BYTES = 4096
"""Room for the command line of a worker."""
READ_AT_START = (
    "PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "GLIBC_", "OPENSSL_", "SSL_", "PYDANTIC_", "COV", "TZ", "HOME", "VIRTUAL_ENV"
)  # fmt: skip
"""Prefixes of variables that the interpreter, libc or a library read when they start, thus before the fork."""
INHERITED = (
    "Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed"
)  # fmt: skip
"""Beginnings of lines of /proc/thread-self/status that a new process inherits."""
NAMESPACES = ("mnt", "net", "ipc", "uts", "user", "pid_for_children")


def start_warm(
    module: str, arguments: Sequence[str], *, environment: Mapping[str, str], pass_fds: Sequence[int] = ()
) -> PipedProcess:
    """Start `python -P -m module arguments` for a `Host`; the descriptors `pass_fds` keep their numbers.

    It is a fresh process where a fork would differ from one: on other systems than Linux, if the parent has threads, or
    if its workers would share a module of the user.
    """
    for _ in range(2 if sys.platform == "linux" else 0):  # the parent may have been killed since its last use
        with contextlib.suppress(OSError):
            forked = _fork(module, arguments, environment, pass_fds)
            if forked is None:
                break
            return forked
    command = [sys.executable, "-P", "-m", module, *arguments]
    return start_command(command, environment=environment, pass_fds=pass_fds)


def end_warm_parent() -> None:
    """End the warm parent, if one is running. Its workers continue, but their exit statuses are lost."""
    with _FINDING:
        for _, parent in _current:
            parent.end()
        _current.clear()


def _fork(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], pass_fds: Sequence[int]
) -> WarmFork | None:
    """Have the warm parent fork a worker; None if it refuses, OSError if it has ended."""
    parent = _current_parent(environment)
    stdin, requests = os.pipe()
    answers, stdout = os.pipe()
    try:
        numbers = (0, 1, 2, *pass_fds)
        pid = parent.ask((module, arguments, dict(environment), numbers), (stdin, stdout, *numbers[2:]))
        return None if pid == REFUSED else WarmFork(pid, parent, os.dup(requests), os.dup(answers))
    finally:
        for descriptor in (stdin, requests, answers, stdout):
            os.close(descriptor)


class WarmFork:
    """A worker of the warm parent, like a `subprocess.Popen` with pipes."""

    def __init__(self, pid: int, parent: _Parent, requests: int, answers: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = os.fdopen(requests, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(answers, "rb")
        self._parent = parent
        self._ended = os.pidfd_open(pid)
        self._status: int | None = None
        self._reaping = threading.Lock()

    @property
    def returncode(self) -> int | None:
        """The status once the worker is reaped, else None.

        Without a parent nothing reserves its id, so it is checked.
        """
        return self._status if self._status is not None or self._parent.is_alive() else self.poll()

    def poll(self) -> int | None:
        """Exit status, minus the signal that ended the worker, or None while it runs; -9 if its parent was killed."""
        return self._reap(0)

    def wait(self) -> int:
        """Wait for the end of the worker; return its status."""
        status = self._reap(None)
        assert status is not None
        return status

    def _reap(self, timeout_ms: int | None) -> int | None:
        with self._reaping:
            if self._status is None:
                poll = select.poll()
                poll.register(self._ended, select.POLLIN)
                if not poll.poll(timeout_ms):
                    return None
                os.close(self._ended)
                self._status = -signal.SIGKILL
                with contextlib.suppress(OSError):
                    self._status = os.waitstatus_to_exitcode(self._parent.ask(self.pid))
            return self._status


# ---------------------------------------------------------------- the parent


class _Parent:
    """A warm parent. It ends when nothing refers to it: neither this module nor a worker that must be reaped."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._connection.settimeout(REPLY_TIMEOUT_S)
        command = [sys.executable, "-P", "-m", "rlhf_core.processes.warm_parent"]
        arguments = [str(theirs.fileno()), str(os.getpid()), " " * COMMAND_BYTES]
        with theirs:
            self._process = start_command(command + arguments, environment=environment, pass_fds=(theirs.fileno(),))
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()
        self._asking = threading.Lock()
        self.end = weakref.finalize(self, _end, self._process, self._connection)

    def ask(self, request: object, descriptors: Sequence[int] = ()) -> int:
        """Send a request; return the reply. OSError if the parent has ended or does not respond; then it is killed."""
        if not self.is_alive():
            raise ChildProcessError("the warm parent has ended, or belongs to the process that we are a fork of")
        message = pickle.dumps(request)
        if len(message) > REQUEST_BYTES:
            return REFUSED
        with self._asking:
            try:
                socket.send_fds(self._connection, [message], descriptors)
                if reply := self._connection.recv(REPLY_BYTES):
                    return int(reply)
                raise ConnectionResetError("the warm parent has ended")
            except BaseException:  # with Ctrl-C, too, a late reply would be taken for the reply to the next request
                self.end()
                raise

    def is_alive(self) -> bool:
        return self._process.poll() is None


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


_FINDING = threading.Lock()
_current: list[tuple[object, _Parent]] = []
"""The warm parent, if any, with the state in which it was started."""


def _current_parent(environment: Mapping[str, str]) -> _Parent:
    """The warm parent for the current state, started if needed. OSError if the state cannot be read or keeps changing.

    It gets only variables that are read at the start, because a fork can read its parent's variables in
    /proc/self/environ.
    """
    read = sorted(item for item in environment.items() if item[0].startswith(READ_AT_START))
    with _FINDING:
        state = (_process_state(), read)
        if not _current or _current[0][0] != state or not _current[0][1].is_alive():
            _current[:] = [(state, _Parent(dict(read)))]
            if _process_state() != state[0]:  # another thread has changed it meanwhile
                _current.clear()
                raise ChildProcessError("the state of this process changes")
        return _current[0][1]


def _process_state() -> tuple[object, ...]:
    """The state that a new process inherits from the calling thread, apart from variables and streams."""
    os.fstat(2)  # each worker gets it
    status = Path("/proc/thread-self/status").read_text(encoding="utf-8").splitlines()
    folder = Path.cwd()
    return (
        sys.executable,
        (str(folder), folder.stat().st_dev, folder.stat().st_ino),
        (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        [Path("/proc/thread-self/ns", name).readlink() for name in NAMESPACES],
        [line for line in status if line.startswith(INHERITED)],
        [Path("/proc/self", name).read_text(encoding="utf-8") for name in ("limits", "cgroup", "oom_score_adj")],
    )


def _forget() -> None:
    """Forget the parent in a fork of this process: it belongs to the original. A vanished thread may hold the lock."""
    global _FINDING
    _FINDING = threading.Lock()
    _current.clear()


os.register_at_fork(after_in_child=_forget)
