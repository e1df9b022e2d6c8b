"""In-memory machines: hosts, processes and threads on one virtual clock, a shared disk, and one disk per host.

The product's code runs unchanged. While a `World` is installed, `os`, `open`, `time`, `fcntl` and the names by which
processes identify themselves are redirected here, only for simulated processes and paths below `/sim`. Each change of
the disk is an operation: another thread may be scheduled there, and a fault may occur. A seed determines everything.
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import random
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from greenlet import getcurrent, greenlet

from rlhf_core.stage import checkpoints
from rlhf_core.store import bucket, disk_lock, fingerprint, layout, leases

ROOT = "/sim"
FIRST_DESCRIPTOR = 1 << 20
STALE_S = 30.0
"""Seconds for which a host of a network file system may use its last view of a folder."""
MAX_OPERATIONS = 40_000
CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FLAGS = {"r": os.O_RDONLY, "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
         "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL}  # fmt: skip


class Killed(BaseException):
    """Raised in the threads of a killed process; their further operations have no effect."""


@dataclass(eq=False)
class Node:
    """A file or a folder. Differences from `durable` may be lost in a power failure."""

    number: int
    modified: float
    entries: dict[str, Node] | None = None
    data: bytes = b""
    durable: Any = b""
    locks: dict[tuple[Process, int], int] = field(default_factory=dict)
    """Process and descriptor that hold a lock of the file -> `fcntl.LOCK_EX` or `fcntl.LOCK_SH`."""


@dataclass(eq=False)
class Process:
    """A process of a host; it is suspended until a time of the virtual clock, usually in the past."""

    world: World
    name: str
    host: str
    number: int
    clock_offset: float
    state: str = "alive"
    stopped_until: float = 0.0
    open: dict[int, tuple[Node, str, int]] = field(default_factory=dict)
    threads: list[Thread] = field(default_factory=list)
    kept: set[object] = field(default_factory=set)
    error: BaseException | None = None

    def end(self) -> None:
        """Release the resources that the kernel releases when a process ends."""
        self.state = "gone"
        for number in list(self.open):
            self.world.close(number, self)


class Thread(greenlet):
    """A thread of a simulated process, which replaces `threading.Thread`."""

    def __init__(self, target: Callable[..., None], args: Any = (), process: Process | None = None, **_: Any) -> None:
        self.process: Process = process or current().process
        self.ready: Callable[[], bool] = lambda: True
        self.wake = 0.0
        super().__init__(lambda: target(*args), self.process.world.scheduler)

    def start(self) -> None:
        self.process.threads.append(self)

    def join(self) -> None:
        self.process.world.block(lambda: self.dead)


class Event:
    """`threading.Event` of a simulated process."""

    is_set = False

    def set(self) -> None:
        self.is_set = True

    def wait(self, timeout: float) -> bool:
        current().process.world.block(lambda: self.is_set, timeout)
        return self.is_set


def current() -> Thread:
    """The running simulated thread."""
    thread: Any = getcurrent()
    return thread


def is_simulated() -> bool:
    return isinstance(getcurrent(), Thread)


class OfProcess:
    """Replaces a set in a module's global state; each simulated process has a separate set."""

    def __contains__(self, one: object) -> bool:
        return one in current().process.kept

    def add(self, one: object) -> None:
        current().process.kept.add(one)

    def discard(self, one: object) -> None:
        current().process.kept.discard(one)


class Listing:
    """The return value of `os.scandir`."""

    def __init__(self, world: World, folder: str) -> None:
        self._entries = iter([Entry(world, folder, name) for name in world.listdir(folder)])

    def __enter__(self) -> Iterator[Entry]:
        return self._entries

    def __exit__(self, *_: object) -> None: ...

    def __next__(self) -> Entry:
        return next(self._entries)


class Entry:
    def __init__(self, world: World, folder: str, name: str) -> None:
        self.world, self.name, self.path = world, name, f"{folder}/{name}"

    def is_dir(self, **_: Any) -> bool:
        node = self.world.find(self.path)
        return node is not None and node.entries is not None

    def is_symlink(self) -> bool:
        return False


class File(io.RawIOBase):
    """An open file, beneath Python's buffers."""

    def __init__(self, number: int) -> None:
        self._process, self._number, self._at = current().process, number, 0
        self._node, self._path, self._flags = self._process.open[number]

    def fileno(self) -> int:
        return self._number

    def readable(self) -> bool:
        return not self._flags & os.O_WRONLY

    def writable(self) -> bool:
        return bool(self._flags & (os.O_WRONLY | os.O_RDWR))

    def readinto(self, buffer: Any) -> int:
        part = self._node.data[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def write(self, content: Any) -> int:
        if self._number in self._process.open and is_simulated():  # otherwise its process is gone
            self._process.world.step("write", self._path)
            before = self._node.data if self._flags & os.O_APPEND else self._node.data[: self._at]
            self._node.data, self._at = before + bytes(content), len(before) + len(content)
            self._node.modified = self._process.world.now
        return len(content)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._process.world.close(self._number, self._process)


def purpose(path: str) -> str:
    """A name for the purpose of a path, without digests, numbers and random parts.

    >>> purpose("/sim/store/tables/keys/.1f2e3d4c5b6a.json.0f1e2d3c-1000-a1b2c3")
    'tables/keys/.#.json.#'
    """
    inside = re.sub(r"\b([0-9a-f]{2}|[0-9a-f]{6,}|\d+)\b", "#", path.removeprefix(f"{ROOT}/store").strip("/"))
    return re.sub(r"(#[.-])+(?=#)", "", inside) + (_who_locks() if path.endswith(".lock") else "")


def _who_locks() -> str:
    """The function that takes the store's lock, as ` in commit`."""
    frame: Any = sys._getframe(3)
    while Path(frame.f_code.co_filename).parent.name not in ("store", "stage") or frame.f_code.co_name in (
        *("alone", "_lock", "write", "update", "_write"),
    ):
        frame = frame.f_back
    return f" in {frame.f_code.co_name}"


class World:
    """The disks, the clock and the processes.

    `strike(process, call, path)` is called before each operation: it may raise, kill, stop the process, or cut the
    power with `cut_power`. `changed(process, call, path)` is called after a change of names.

    With `stale`, the hosts see names late, as on a network file system. `locks` is `sound`, or `of one host`: then two
    hosts do not see each other's locks.
    """

    def __init__(self, seed: int, *, stale: bool = False, locks: str = "sound") -> None:
        self.random, self.scheduler = random.Random(seed), getcurrent()
        self.stale, self.locks = stale, locks
        self.now, self.operations = 1e9, 0
        self.without_power: list[str] = []
        self.numbers = iter(range(FIRST_DESCRIPTOR, 1 << 60))
        self.root = self.node(folder=True)
        self.pending: list[list[tuple[Node, str, Node | None]]] = []
        self.seen: dict[tuple[str, str], tuple[float, list[str] | None]] = {}
        self.processes: list[Process] = []
        self.strike: Callable[[Process, str, str], None] = lambda process, call, path: None
        self.changed: Callable[[Process, str, str], None] = lambda process, call, path: None

    # ------------------------------------------------------------ processes

    def start(self, name: str, host: str, work: Callable[[], None], clock_offset: float = 0.0) -> None:
        """Add a process that runs `work` once `run` schedules it."""
        process = Process(self, name, host, 1000 + len(self.processes), clock_offset)

        def main() -> None:
            try:
                work()
            except (Exception, KeyboardInterrupt) as error:
                process.error = error
            finally:
                process.end()

        Thread(main, process=process).start()
        self.processes.append(process)

    def run(self) -> list[Process]:
        """Run all processes until they end; returns the processes that wait forever."""
        while True:
            while self.without_power:
                self._lose_power(self.without_power.pop())
            for thread in [thread for one in self.processes if one.state == "gone" for thread in one.threads]:
                with suppress(Killed):
                    thread.throw(Killed)
                thread.process.threads.remove(thread)
            living = [one for one in self.processes if one.state != "gone"]
            awake = [one for one in living if one.stopped_until <= self.now]
            threads = [thread for one in awake for thread in one.threads if not thread.dead]
            able = [thread for thread in threads if thread.wake <= self.now or thread.ready()]
            if able:
                with suppress(Killed):
                    self.random.choice(able).switch()
                continue
            times = [one.stopped_until for one in living if one not in awake] + [one.wake for one in threads]
            soonest = min(times, default=float("inf"))
            if soonest == float("inf"):
                return living
            self.now = soonest

    def kill(self) -> None:
        """End the running process."""
        current().process.end()
        raise Killed

    def cut_power(self, host: str = "") -> None:
        """End the running process, and all others of the host or of every host. Writes without fsync may be lost."""
        self.without_power.append(host)
        self.kill()

    def block(self, ready: Callable[[], bool], timeout: float = float("inf")) -> None:
        """Let other threads run until `ready` or the timeout."""
        thread = current()
        thread.ready, thread.wake = ready, self.now + timeout
        self._others()
        thread.ready, thread.wake = (lambda: True), 0.0

    def step(self, call: str, path: str) -> None:
        """Begin an operation of the running process."""
        self.operations, self.now = self.operations + 1, self.now + 0.002
        if self.operations > MAX_OPERATIONS:
            raise RuntimeError("more operations than a history has")
        self._look(0.15)
        self.strike(current().process, call, path)
        if current().process.stopped_until > self.now:
            self._others()

    def _look(self, chance: float = 0.02) -> None:
        """With probability `chance`, let other threads run before the disk is read."""
        if current().process.state == "gone":
            raise Killed
        if self.random.random() < chance:
            self._others()

    def _others(self) -> None:
        self.scheduler.switch()
        if current().process.state == "gone":
            raise Killed

    # ------------------------------------------------------------ the disk

    def node(self, *, folder: bool = False) -> Node:
        return Node(next(self.numbers), self.now, {} if folder else None, durable={} if folder else b"")

    def make_folder(self, name: str) -> None:
        """Create `/sim/<name>` on its disk. The disk of a host has the name of the host."""
        assert self.root.entries is not None
        self.root.entries[name] = self.root.durable[name] = self.node(folder=True)

    def find(self, path: str) -> Node | None:
        """The node on the disk at a path, None if there is none."""
        node: Node | None = self.root
        for name in path[len(ROOT) :].split("/"):
            if name and name != ".":
                node = None if node is None or node.entries is None else node.entries.get(name)
        return node

    def _parent(self, path: str) -> tuple[Node, str]:
        above, _, name = path.rpartition("/")
        folder = self.find(above)
        if folder is None or folder.entries is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return folder, name

    def _existing(self, path: str, node: Node | None) -> Node:
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return node

    def _looked_up(self, path: str) -> Node:
        """The node that a process finds at a path; its host may have cached that the path does not exist."""
        self._look()
        key, node = (current().process.host, path), self.find(path)
        if self.stale and node is None:
            self.seen[key] = (self.now, None)
        since, names = self.seen.get(key, (0.0, []))
        return self._existing(path, None if names is None and self.now - since < STALE_S else node)

    def _change(self, call: str, path: str, *changes: tuple[Node, str, Node | None], old: str = "") -> None:
        for folder, name, node in changes:
            assert folder.entries is not None
            folder.entries.pop(name, None)
            folder.entries |= {name: node} if node else {}
            folder.modified = self.now
        self.pending.append(list(changes))
        for seen in (path, path.rpartition("/")[0], old, old.rpartition("/")[0]):
            self.seen.pop((current().process.host, seen), None)
        self.changed(current().process, call, path)

    def _lose_power(self, host: str) -> None:
        """End the processes of a host, or of all hosts, and keep a random part of the writes without fsync."""
        self.seen.clear()
        for process in self.processes:
            if host in ("", process.host):
                process.end()
        top = self.root.durable[host] if host else self.root
        inside = {id(folder) for folder in _folders(top)}
        kept = self.random.choice([0.0, 0.5, 0.5, 1.0])
        for changes in [one for one in self.pending if any(id(folder) in inside for folder, _, _ in one)]:
            if self.random.random() < kept:
                self._make_durable(changes)
            self.pending.remove(changes)
        self._fall_back(top, kept)

    def _make_durable(self, changes: list[tuple[Node, str, Node | None]]) -> None:
        for folder, name, node in changes:
            folder.durable.pop(name, None)
            folder.durable |= {name: node} if node else {}

    def _fall_back(self, node: Node, kept: float) -> None:
        if node.entries is None:
            if self.random.random() >= kept:
                part = node.data[: self.random.randrange(len(node.data) + 1)]
                node.data = node.durable if node.data == node.durable else self.random.choice([node.durable, part])
            node.durable = node.data
            return
        node.entries = dict(node.durable)
        for inside in node.entries.values():
            self._fall_back(inside, kept)

    # ------------------------------------------------------------ functions of `os`

    def stat(self, path: Any, **_: Any) -> os.stat_result:
        node = current().process.open[path][0] if isinstance(path, int) else self._looked_up(path)
        kind = stat.S_IFREG | 0o644 if node.entries is None else stat.S_IFDIR | 0o755
        at = node.modified
        return os.stat_result(
            [kind, node.number, 1, 1, 0, 0, len(node.data), *[int(at)] * 3, *[at] * 3, *[int(at * 1e9)] * 3]
        )

    def mkdir(self, path: str, *_: Any) -> None:
        self.step("mkdir", path)
        folder, name = self._parent(path)
        if name in (folder.entries or {}):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        self._change("mkdir", path, (folder, name, self.node(folder=True)))

    def rename(self, path: str, target: str) -> None:
        self.step("rename", target)
        node, there = self._existing(path, self.find(path)), self.find(target)
        if there is not None and there.entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", target)
        self._change("rename", target, (*self._parent(path), None), (*self._parent(target), node), old=path)

    def link(self, path: str, target: str, **_: Any) -> None:
        self.step("link", target)
        node = self._existing(path, self.find(path))
        folder, name = self._parent(target)
        self.seen.pop((current().process.host, target), None)  # the server's response replaces the cached view
        if name in (folder.entries or {}):
            raise FileExistsError(errno.EEXIST, "File exists", target)
        self._change("link", target, (folder, name, node))

    def unlink(self, path: str, **_: Any) -> None:
        self.step("unlink", path)
        if self._existing(path, self.find(path)).entries:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        self._change("unlink", path, (*self._parent(path), None))

    def listdir(self, path: str) -> list[str]:
        entries = self._looked_up(path).entries
        if entries is None:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
        host = current().process.host
        since, names = self.seen.get((host, path), (0.0, None))
        if names is not None and self.now - since < STALE_S:
            return [name for name in names if name in entries]
        if self.stale:
            self.seen[host, path] = (self.now, list(entries))
            for name in entries:
                self.seen.pop((host, f"{path}/{name}"), None)
        return list(entries)

    def utime(self, path: str, times: tuple[float, float] | None = None) -> None:
        self.step("utime", path)
        self._looked_up(path).modified = self.now if times is None else times[1]

    def open(self, path: str, flags: int, *_: Any) -> int:
        if flags & CHANGES:
            self.step("open", path)
        node = self.find(path) if flags & CHANGES else self._looked_up(path)
        if node is not None and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        if node is None and flags & os.O_CREAT:
            node = self.node()
            self._change("open", path, (*self._parent(path), node))
        node = self._existing(path, node)
        node.data = b"" if flags & os.O_TRUNC else node.data
        number = next(self.numbers)
        current().process.open[number] = (node, path, flags)
        return number

    def close(self, number: int, process: Process | None = None) -> None:
        process = process or current().process
        node, _, _ = process.open.pop(number, (self.root, "", 0))
        node.locks.pop((process, number), None)

    def fsync(self, number: int) -> None:
        node, path, _ = current().process.open[number]
        self.step("fsync", path)
        if node.entries is None:
            node.durable = node.data
        for changes in [one for one in self.pending if any(folder is node for folder, _, _ in one)]:
            self._make_durable(changes)
            self.pending.remove(changes)

    def flock(self, number: int, operation: int) -> None:
        process = current().process
        node, path, _ = process.open[number]

        def is_free() -> bool:
            return not [
                how
                for (other, held), how in node.locks.items()
                if (other, held) != (process, number)
                and (how == fcntl.LOCK_EX or operation & fcntl.LOCK_EX)
                and (self.locks != "of one host" or other.host == process.host)
            ]

        self.step("flock", path)
        while not is_free():
            if operation & fcntl.LOCK_NB:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            self.block(is_free)
        node.locks[process, number] = operation & ~fcntl.LOCK_NB

    def open_file(self, path: str, mode: str = "r", *_: Any, **__: Any) -> Any:
        raw = File(self.open(path, FLAGS[mode.strip("bt")]))
        buffered: Any = io.BufferedReader(raw) if raw.readable() else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

    @contextmanager
    def temporary_file(self, dir: Any, prefix: str) -> Iterator[Any]:
        path = f"{dir}/{prefix}{self.random.randbytes(4).hex()}"
        with self.open_file(path, "xb") as stream:
            try:
                yield SimpleNamespace(name=path, write=stream.write, flush=stream.flush, fileno=stream.fileno)
            finally:
                self.unlink(path)

    # ------------------------------------------------------------ replacing the machine

    def _state(self, number: int, _: int = 0) -> str:
        found = [one for one in self.processes if (one.number, one.host) == (number, current().process.host)]
        return "gone" if not found else "stopped" if found[0].stopped_until > self.now else found[0].state

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Redirect the operating system's functions here, only for simulated processes."""
        ours: list[tuple[Any, str, Callable[..., Any]]] = [
            *((os, name, getattr(self, name)) for name in ("mkdir", "rename", "link", "unlink", "listdir", "utime", "open", "fsync", "close")),
            *((os, name, self.stat) for name in ("stat", "lstat", "fstat")),
            (os, "replace", self.rename),
            (os, "rmdir", self.unlink),
            (os, "scandir", lambda path: Listing(self, path)),
            (os, "chmod", lambda path, mode, **_: None),
            (os, "statvfs", lambda path: SimpleNamespace(f_bavail=1 << 30, f_frsize=4096)),
            (fcntl, "flock", self.flock),
            (io, "open", self.open_file),
            (builtins, "open", self.open_file),
        ]  # fmt: skip
        of_process: list[tuple[Any, str, Callable[..., Any]]] = [
            *(
                (module, "here", lambda: (current().process.host, "boot", "pids"))
                for module in (layout, leases, bucket)
            ),
            (leases, "process_state", self._state),
            (leases, "process_stat", lambda number: ("R", number)),
            (layout, "is_running", lambda number: self._state(number) != "gone"),
            (os, "getpid", lambda: current().process.number),
            (secrets, "token_hex", lambda size: self.random.randbytes(size).hex()),
            (tempfile, "NamedTemporaryFile", self.temporary_file),
            (time, "time", lambda: self.now + current().process.clock_offset),
            (time, "time_ns", lambda: int((self.now + current().process.clock_offset) * 1e9)),
            (time, "monotonic", lambda: self.now),
            (time, "clock_gettime", lambda clock: self.now),
            (time, "sleep", lambda seconds: self.block(lambda: False, seconds)),
        ]
        threads = SimpleNamespace(**vars(threading) | {"Thread": Thread, "Event": Event, "Timer": _TIMER})
        with ExitStack() as stack:
            for module, name, call in ours:
                stack.enter_context(mock.patch.object(module, name, _for_paths(call, getattr(module, name))))
            for module, name, call in of_process:
                stack.enter_context(mock.patch.object(module, name, _for_processes(call, getattr(module, name))))
            for module in (leases, checkpoints, disk_lock):
                stack.enter_context(mock.patch.object(module, "threading", threads))
            for module in (layout, fingerprint, bucket):
                stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", _POOL))
            for module, name in ((layout, "_DURABLE"), (leases, "_HELD")):
                stack.enter_context(mock.patch.object(module, name, OfProcess()))
            stack.enter_context(mock.patch.object(shutil, "_use_fd_functions", False))
            yield


def _folders(node: Node) -> Iterator[Node]:
    """A folder and all folders below it, before and after the writes that may be lost."""
    if node.entries is not None:
        yield node
        for one in {id(one): one for one in (*node.entries.values(), *node.durable.values())}.values():
            yield from _folders(one)


_TIMER = mock.MagicMock()
_POOL = mock.MagicMock()
_POOL.return_value.__enter__.return_value.map = map


def _for_processes(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: (ours if is_simulated() else theirs)(*args, **kwargs)


def _for_paths(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_simulated() and args:
            first = args[0] if isinstance(args[0], int) else os.fspath(args[0])
            if first >= FIRST_DESCRIPTOR if isinstance(first, int) else str(first).startswith(ROOT):
                return ours(first, *(os.fspath(one) if isinstance(one, Path) else one for one in args[1:]), **kwargs)
        return theirs(*args, **kwargs)

    return call
