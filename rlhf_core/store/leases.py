"""Leases: one process computes a key, the others wait for its result.

A lease is a small file with its owner's host, boot id, process and a secret token. A thread renews it. A lease is lost
when its owner is a process of this machine that has ended, or when the file was not renewed for too long; then the next
process takes it over. Clocks jump, and those of two hosts differ. So the age is measured by the clock of the disk, and
the next process also watches the file for longer than a living owner needs to renew it. A process that lost its lease
without noticing is stopped by `Lease.check` before each step and each checkpoint. It may be suspended after any check:
what must not be written by a loser (the record, the history of attempts) is written in `Lease.undisturbed`.
"""

import errno
import fcntl
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import here, process_stat, process_state
from rlhf_core.store.layout import read_json, write_json

logger = logging.getLogger(__name__)

TTL_SECONDS = 120.0  # six heartbeats: a slow disk or a long call into a library may cost some of them
HEARTBEAT_SECONDS = 20.0  # rare enough for a network disk with hundreds of runs
POLL_SECONDS = 0.25  # how late a waiting process notices the result
WATCH_SECONDS = 2.25 * HEARTBEAT_SECONDS
"""Time by the monotonic clock that a lease must be unchanged before it is taken from an owner that may be alive."""
LOCK_SLOW_SECONDS = 10.0
"""Time of waiting for another process's change of a lease after which a warning is logged."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a lease. `pid_started` is the process's start time in clock ticks after boot, so that a process
    that reuses the number is not mistaken for the owner. `expires` is in seconds of the owner's wall clock, for people
    to read: it is never compared with another clock."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: int
    token: str
    expires: float

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


_OWNER = TypeAdapter(Owner)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that this process holds. `waited`: whether another process held it before."""

    folder: Path
    key: str
    owner: Owner
    waited: bool

    def may_be_ours(self) -> bool:
        """Return whether the lease has not been taken over; also True, with a warning, if the disk cannot be read."""
        try:
            holder = _read(self.folder, self.key)
        except OSError as error:
            logger.warning("could not read lease %s: %s", self.key[:12], error)
            return True
        return holder is not None and holder.token == self.owner.token

    def check(self) -> None:
        """Raise ArtifactError if another process has taken the lease over, as it may right after; see `undisturbed`.

        Raises OSError if the lease cannot be read.
        """
        holder = _read(self.folder, self.key)
        if holder is None or holder.token != self.owner.token:
            taker = "no process" if holder is None else str(holder)
            raise ArtifactError(
                f"lease {self.key[:12]}",
                taker,
                "took the lease over, because this process had not renewed it",
                "run again",
            )

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Prevent a takeover of the lease inside the block. Raises like `check` on entry.

        Use it for a few quick changes that must not mix with another process's: all who want a lease wait meanwhile.
        """
        with alone(self.folder):
            self.check()
            yield


@contextmanager
def hold(folder: Path, key: str, *, on_wait: Callable[[Owner], None] | None = None) -> Iterator[Lease]:
    """Hold the lease of `key`, after waiting for a living owner to release it; `on_wait` gets that owner, once."""
    lease = _acquire(folder, key, on_wait)
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(lease, stop), name=f"lease-{key[:8]}", daemon=True)
    heart.start()
    try:
        yield lease
    finally:
        stop.set()
        heart.join()
        with alone(lease.folder):
            holder = _read(lease.folder, lease.key)
            if holder is not None and holder.token == lease.owner.token:
                lease_file(lease.folder, lease.key).unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the store for a few quick changes: leases, records, pins and removals change in it alone.

    The kernel frees the lock of a process that dies. It is not reentrant. Raises ArtifactError if the disk has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, probe = (os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for _ in range(2))
    try:
        try:
            _lock(descriptor, folder)
            with suppress(BlockingIOError):
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise OSError(errno.ENOLCK, "a locked file can be locked again")
        except OSError as error:
            rule = f"the disk does not support file locks ({error.strerror}), so two runs could compute the same key"
            remedy = "choose a folder on another disk: set `store` in the profile, or RLHF_HOME"
            raise ArtifactError("store", str(folder.parent), rule, remedy) from error
        yield
    finally:
        os.close(probe)
        os.close(descriptor)


def living_owner(folder: Path, key: str) -> Owner | None:
    """Return the owner that computes `key` now, or None."""
    owner = _read(folder, key)
    return None if owner is None or _has_lost(folder, key, owner) else owner


def sweep(folder: Path) -> list[tuple[str, Owner]]:
    """Remove the leases whose owner has ended; return their keys and owners.

    Leases of silent owners, which may be on another machine, stay: only a process that wants one has time to watch it.
    """
    if not folder.is_dir():
        return []
    swept = []
    with alone(folder):
        for path in sorted(folder.glob("*.json")):
            owner = _read(folder, path.stem)
            if owner is not None and is_gone(owner):
                path.unlink(missing_ok=True)
                swept.append((path.stem, owner))
    return swept


def is_gone(owner: Owner) -> bool:
    """Return whether the owner's process has ended; always False for a process of another machine."""
    return _is_local(owner) and process_state(owner.pid, owner.pid_started) == "gone"


def _is_local(owner: Owner) -> bool:
    return (owner.host, owner.boot_id, owner.pid_namespace) == here()


def _has_lost(folder: Path, key: str, owner: Owner) -> bool:
    """Return whether the owner has lost its lease.

    On this machine the process state decides, so a suspended laptop or a long call into a library does not cost a
    living owner its lease. A stopped process, or one on another machine, has lost its lease when it is silent.
    """
    if _is_local(owner):
        state = process_state(owner.pid, owner.pid_started)
        if state != "stopped":
            return state == "gone"
    return _is_silent(lease_file(folder, key))


def _is_silent(path: Path) -> bool:
    """Return whether the lease in `path` was not renewed for `TTL_SECONDS` by the clock of its disk.

    The lease's time is compared with that of a file created now, so clocks of two hosts are never compared.
    """
    try:
        return disk_time(path.parent) - path.stat().st_mtime > TTL_SECONDS
    except OSError as error:
        logger.warning("lease %s: could not determine its age: %s", path.stem[:12], error)
        return False


def disk_time(folder: Path) -> float:
    """Return the time by the clock of the disk that holds `folder`, which that of this host may differ from."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as probe:
        probe.write(b"now")
        probe.flush()
        os.fsync(probe.fileno())
        return Path(probe.name).stat().st_mtime


# ---------------------------------------------------------------- the file


def _acquire(folder: Path, key: str, on_wait: Callable[[Owner], None] | None) -> Lease:
    ours = ourselves()
    waited = False
    watch = _Watch(lease_file(folder, key))
    while True:
        with alone(folder):
            holder = _read(folder, key)
            if holder is None or is_gone(holder) or (_has_lost(folder, key, holder) and watch.is_over()):
                if holder is not None:
                    logger.warning("lease %s: %s is gone; taking over", key[:12], holder)
                ours = replace(ours, expires=time.time() + TTL_SECONDS)
                _write(folder, key, ours)
                return Lease(folder, key, ours, waited)
        if not waited:
            waited = True
            logger.info("lease %s: waiting for %s, which is computing it", key[:12], holder)
            if on_wait is not None:
                on_wait(holder)
        time.sleep(POLL_SECONDS)


class _Watch:
    """A measurement of how long a lease has been unchanged, by the monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._looked = time.monotonic()
        self._watched = 0.0

    def is_over(self) -> bool:
        """Check the file and return whether it has been unchanged for `WATCH_SECONDS`.

        A long time between two checks counts as one heartbeat: what delayed us (a suspended machine, a stopped process)
        may have delayed the owner too.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        try:
            status = self._path.stat()
        except FileNotFoundError:  # just released
            return True
        seen = (status.st_ino, status.st_mtime_ns)  # each renewal is a new file
        self._watched = self._watched + min(since, HEARTBEAT_SECONDS) if seen == self._seen else 0.0
        self._seen = seen
        return self._watched >= WATCH_SECONDS


def _beat(lease: Lease, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        try:
            with alone(lease.folder):
                holder = _read(lease.folder, lease.key)
                if holder is None or holder.token != lease.owner.token:
                    logger.error("lease %s was taken over by %s", lease.key[:12], holder)
                    return
                _write(lease.folder, lease.key, replace(holder, expires=time.time() + TTL_SECONDS))
        except (OSError, ArtifactError) as error:
            logger.warning("could not renew lease %s: %s", lease.key[:12], error)


def _lock(descriptor: int, folder: Path) -> None:
    with suppress(BlockingIOError):
        return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    what = "%s: still waiting for another process to release the lock; if that process is suspended (Ctrl-Z), resume or end it"
    warning = threading.Timer(LOCK_SLOW_SECONDS, logger.warning, (what, folder))
    warning.daemon = True
    warning.start()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        warning.cancel()


def lease_file(folder: Path, key: str) -> Path:
    """Return the file of the lease of `key`."""
    return folder / f"{key}.json"


def _read(folder: Path, key: str) -> Owner | None:
    """Return the owner of a lease; None if there is none, or the file is not a lease: then the next process overwrites it."""
    try:
        return _OWNER.validate_python(read_json(lease_file(folder, key)))
    except ValidationError:
        return None


def _write(folder: Path, key: str, owner: Owner) -> None:
    # Not durable: after a power cut the owner is gone anyway.
    write_json(lease_file(folder, key), asdict(owner), durable=False)


# ---------------------------------------------------------------- processes


def ourselves() -> Owner:
    """Return this process as an owner, with a token of its own."""
    host, boot_id, pid_namespace = here()
    started = process_stat(os.getpid())
    return Owner(
        host=host,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        pid=os.getpid(),
        pid_started=-1 if started is None else started[1],
        token=secrets.token_hex(16),
        expires=0.0,
    )
