"""Leases: one process computes a key, the others wait for its result.

A lease is a record with its owner's host, boot id, process and a secret token. A thread renews it. A lease is lost
when its owner is a process of this machine that has ended, or when it was not renewed for too long; then the next
process takes it over. Clocks jump, and those of two hosts differ. So the age is measured by the clock of the place, and
the next process also watches the lease for longer than a living owner needs to renew it. A process that lost its lease
without noticing is stopped by `Lease.check` before each step and each checkpoint. It may be suspended after any check:
what must not be written by a loser (the record, the history of attempts) is written in `Lease.undisturbed`.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import here, process_stat, process_state
from rlhf_core.store.layout import mounted
from rlhf_core.store.places import Conflict, Records, Unreachable
from rlhf_core.store.places.local import LocalRecords, alone

logger = logging.getLogger(__name__)

TTL_SECONDS = 120.0  # six heartbeats: a slow disk or a long call into a library may cost some of them
HEARTBEAT_SECONDS = 20.0  # rare enough for a network disk with hundreds of runs
POLL_SECONDS = 0.25  # how late a waiting process notices the result
LOOK_SECONDS = 1.0  # a step of a small model takes less than a request
WATCH_SECONDS = 2.25 * HEARTBEAT_SECONDS
"""Time by the monotonic clock that a lease must be unchanged before it is taken from an owner that may be alive."""


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

    @property
    def claim(self) -> str:
        """Return what others wait for. The process of another machine or container may have ended: nobody here sees it."""
        if _is_local(self):
            return f"{self} is computing it"
        return f"{self} is computing it; should that have ended, its lease is taken over {TTL_SECONDS:.0f} s after its last sign"


_OWNER = TypeAdapter(Owner)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that this process holds. `waited`: whether another process held it before."""

    folder: Path
    key: str
    owner: Owner
    waited: bool
    _looked: dict[str, float] = field(default_factory=dict, compare=False, repr=False)
    """When a bucket was last asked, by the monotonic clock."""

    def may_be_ours(self) -> bool:
        """Return whether the lease has not been taken over; also True, with a warning, if the place cannot be read.

        A bucket, which takes its time, is asked once in `LOOK_SECONDS`.
        """
        if not records_of(self.folder).has_clock:
            now = time.monotonic()
            if "at" in self._looked and now - self._looked["at"] < LOOK_SECONDS:
                return True
            self._looked["at"] = now
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
        _release(lease)


def living_owner(folder: Path, key: str) -> Owner | None:
    """Return the owner that computes `key` now, or None."""
    records = records_of(folder)
    owner = _held(records, name_of(key))[0]
    return (
        None
        if owner is None or ((records.has_clock or _is_local(owner)) and _may_have_lost(records, key, owner))
        else owner
    )


def sweep(folder: Path) -> list[tuple[str, Owner]]:
    """Remove the leases whose owner has ended; return their keys and owners.

    Leases of silent owners, which may be on another machine, stay: only a process that wants one has time to watch it.
    """
    if mounted(folder) is None and not folder.is_dir():
        return []
    swept, records = [], records_of(folder)
    for name in records.names():
        owner, version = _held(records, name)
        if owner is not None and is_gone(owner):
            with suppress(Conflict):  # another process has just taken it over
                records.drop(name, version or "")
                swept.append((name.removesuffix(".json"), owner))
    return swept


def is_gone(owner: Owner) -> bool:
    """Return whether the owner's process has ended; always False for a process of another machine."""
    return _is_local(owner) and process_state(owner.pid, owner.pid_started) == "gone"


def _is_local(owner: Owner) -> bool:
    return (owner.host, owner.boot_id, owner.pid_namespace) == here()


def _may_have_lost(records: Records, key: str, owner: Owner) -> bool:
    """Return whether the owner may have lost its lease, as far as one look tells.

    On this machine the process state decides, so a suspended laptop or a long call into a library does not cost a
    living owner its lease. A stopped process, or one on another machine, has lost its lease when it is silent.
    """
    if _is_local(owner):
        state = process_state(owner.pid, owner.pid_started)
        if state != "stopped":
            return state == "gone"
    return _is_silent(records, name_of(key))


def _is_silent(records: Records, name: str) -> bool:
    """Return whether the lease was not renewed for `TTL_SECONDS` by the clock of its place, or that has none."""
    try:
        return records.age(name) > TTL_SECONDS
    except FileNotFoundError:  # released just now
        return False
    except OSError as error:
        logger.warning("lease %s: could not determine its age: %s", name[:12], error)
        return False


# ---------------------------------------------------------------- the record


def records_of(folder: Path) -> Records:
    """Return the records of the leases in a folder, which are those of a bucket if the folder mirrors it."""
    shared = mounted(folder)
    return LocalRecords(folder) if shared is None else shared.leases


def _acquire(folder: Path, key: str, on_wait: Callable[[Owner], None] | None) -> Lease:
    ours = ourselves()
    waited = False
    watch, records = _Watch(), records_of(folder)
    while True:
        holder, version = _held(records, name_of(key))
        least = WATCH_SECONDS if records.has_clock else TTL_SECONDS
        if (
            holder is None
            or is_gone(holder)
            or (_may_have_lost(records, key, holder) and watch.is_over(version, least))
        ):
            ours = replace(ours, expires=time.time() + TTL_SECONDS)
            try:
                records.put(name_of(key), asdict(ours), version)
            except Conflict:  # another process was faster, or its owner has renewed it
                continue
            if holder is not None:
                logger.warning("lease %s: %s is gone; taking over", key[:12], holder)
            return Lease(folder, key, ours, waited)
        if not waited:
            waited = True
            logger.info("lease %s: %s", key[:12], holder.claim)
            if on_wait is not None:
                on_wait(holder)
        time.sleep(POLL_SECONDS)


def _release(lease: Lease) -> None:
    records, name = records_of(lease.folder), name_of(lease.key)
    try:
        holder, version = _held(records, name)
        if holder is not None and holder.token == lease.owner.token:
            with suppress(Conflict):  # taken over just now
                records.drop(name, version or "")
    except Unreachable as error:  # what was done under it is done: others wait until it is silent
        logger.warning("could not release lease %s: %s", lease.key[:12], error)


class _Watch:
    """A measurement of how long a lease has been unchanged, by the monotonic clock."""

    def __init__(self) -> None:
        self._seen: str | None = None
        self._looked = time.monotonic()
        self._watched = 0.0

    def is_over(self, version: str | None, seconds: float) -> bool:
        """Return whether the lease has been at this version for so many seconds; each renewal is a new one.

        A long time between two looks counts as one heartbeat: what delayed us (a suspended machine, a stopped process)
        may have delayed the owner too.
        """
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        self._watched = self._watched + min(since, HEARTBEAT_SECONDS) if version == self._seen else 0.0
        self._seen = version
        return self._watched >= seconds


def _beat(lease: Lease, stop: threading.Event) -> None:
    records, name = records_of(lease.folder), name_of(lease.key)
    while not stop.wait(HEARTBEAT_SECONDS):
        try:
            holder, version = _held(records, name)
            if holder is None or holder.token != lease.owner.token:
                logger.error("lease %s was taken over by %s", lease.key[:12], holder)
                return
            records.put(name, asdict(replace(holder, expires=time.time() + TTL_SECONDS)), version)
        except (OSError, ArtifactError, Conflict) as error:
            logger.warning("could not renew lease %s: %s", lease.key[:12], error)


def lease_file(folder: Path, key: str) -> Path:
    """Return the file of the lease of `key`."""
    return folder / name_of(key)


def name_of(key: str) -> str:
    """Return the name of the record of a lease."""
    return f"{key}.json"


def _read(folder: Path, key: str) -> Owner | None:
    return _held(records_of(folder), name_of(key))[0]


def _held(records: Records, name: str) -> tuple[Owner | None, str | None]:
    """Return owner and version of a lease; no owner if there is none, or it is not a lease: the next process overwrites it."""
    found = records.get(name)
    if found is None:
        return None, None
    try:
        return _OWNER.validate_python(found.value), found.version
    except ValidationError:
        return None, found.version


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
