"""Fork Python workers from one process that has imported their modules, the warm parent.

`rlhf_core.processes.warm` starts it. `python -P -m rlhf_core.processes.warm_parent SOCKET STARTER ROOM` ends with the
process STARTER. A request on SOCKET is a pickle: a process id to reap, or the module, arguments, environment and
descriptor numbers of a worker to fork. The reply is a number.

The parent has no threads and imports no user code. A fork continues like `python -P -m MODULE ARGUMENTS` in a new
session. ROOM is a long argument. A fork writes its own command line into that memory, where `ps` reads it.
"""

import contextlib
import ctypes
import fcntl
import importlib
import os
import pickle
import runpy
import select
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rlhf_core.processes.installed import is_users_own
from rlhf_core.processes.large_imports import large_imports

REQUEST_BYTES = 2**17
"""A larger environment does not fit into one message under the usual limits of Linux."""
MOST_DESCRIPTORS = 16
REFUSED = -1
"""The reply if a fork would differ from a fresh process, or cannot be made."""
PROGRAM = Path(__file__).resolve().parents[1]


def fork_on_request(connection: socket.socket, starter: int) -> str:
    """Serve requests until the starter ends. Return only in a fork: the module that it must run."""
    driver = os.pidfd_open(starter)
    if os.getppid() != starter:  # it ended before we could watch it, and its id may belong to another process
        os._exit(1)
    poll = select.poll()
    for descriptor in (connection.fileno(), driver):
        poll.register(descriptor, select.POLLIN)
    can_fork: dict[str, bool] = {}
    with contextlib.suppress(ConnectionError):  # the starter has given this parent up
        # The end of the connection is not enough: a fork of the starter may hold the other end.
        while driver not in dict(poll.poll()):
            message, descriptors, _, _ = socket.recv_fds(connection, REQUEST_BYTES, MOST_DESCRIPTORS)
            if not message:
                break
            request = pickle.loads(message)
            if isinstance(request, int):
                connection.send(b"%d" % os.waitpid(request, 0)[1])
                continue
            module, arguments, environment, numbers = request
            if module not in can_fork:
                can_fork[module] = _import(module) and _is_clean()
            worker = _fork() if can_fork[module] else REFUSED
            if worker == 0:
                os.close(driver)
                connection.close()
                _move(descriptors, numbers)
                _become([*sys.orig_argv[:3], module, *arguments], environment)
                return str(module)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(b"%d" % worker)
    os._exit(0)


def _fork() -> int:
    try:
        return os.fork()
    except OSError:  # no memory or no process left; the attempt to start a fresh process gives the reason
        return REFUSED


def _import(module: str) -> bool:
    """Import a module with all that it imports, and remove the module itself: a fork must have it only as `__main__`."""
    try:
        with large_imports():
            importlib.import_module(module)
    except Exception:  # of a user's module in place of a library; a fresh process shows it
        return False
    package, _, name = module.rpartition(".")
    del sys.modules[module]
    delattr(sys.modules[package], name)
    sys.path_importer_cache.clear()  # its lists of files would be old when a fork imports user code
    return True


def _is_clean() -> bool:
    """True without threads, and without a user's module in place of a library or as `sitecustomize`."""
    files = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    users = [file for file in files if is_users_own(file) and not file.resolve().is_relative_to(PROGRAM)]
    return not users and len(list(Path("/proc/self/task").iterdir())) == 1


def _move(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors other numbers, which may overlap with the present ones."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take the session, environment and command line of a fresh process."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv[:] = command
    sys.argv[:] = ["-m", *command[4:]]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__annotations__ = {}  # as the interpreter makes it
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc_pid_stat(5)
    if 0 < begin < end:
        shown = b"\0".join(map(os.fsencode, command))[: end - begin - 1]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    name = fork_on_request(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # as `python -m` does
