"""The table of a key: who computes it, what was attempted, its newest checkpoint, and its record.

    lease      owner with a random token, and a counter that a heartbeat raises; missing if nobody computes the key
    attempts   the history: number, how each attempt ended, its inputs
    work       the newest checkpoint that other nodes can read (`Store.save_work`)
    record     the result; the key has one only from this write on

The holder of the lease changes the table with `Lease.update` alone. It checks the token in the same compare-and-set that
writes, so a process that lost its lease without noticing can neither commit nor replace a checkpoint.

No clock decides about a lease. A waiting process takes it over if the owner is a process of this machine that has ended,
or if it has itself watched the lease for `TTL_S` by its monotonic clock and no heartbeat came.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import here, process_stat, process_state
from rlhf_core.store.layout import remove_tree
from rlhf_core.store.protocol import Conflict, Files, Gone, Store, Table

logger = logging.getLogger(__name__)

TTL_S = 120.0  # six heartbeats
HEARTBEAT_S = 20.0
POLL_S = 0.25
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a lease. `beat` is raised by each heartbeat."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: int
    token: str
    beat: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def claim(self) -> str:
        """What others wait for. The process of another machine may have ended: nobody here sees it."""
        if _is_local(self):
            return f"{self} is computing it"
        return (
            f"{self} is computing it; should that have ended, its lease is taken over {TTL_S:.0f} s after its last sign"
        )


class Lost(ArtifactError):
    """Another process has taken the lease over."""


def name_of(key: str) -> str:
    """The name of the table of a key."""
    return f"keys/{key}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of this process to compute `key`. `waited`: whether another process had it before."""

    store: Store
    key: str
    token: str
    waited: bool
    _looked: list[float] = field(default_factory=list, compare=False, repr=False)
    _known: list[Table] = field(default_factory=list, compare=False, repr=False)

    def may_be_ours(self) -> bool:
        """False if another process has taken the lease over. Asks once a second; an unreachable store passes."""
        if self._looked and time.monotonic() - self._looked[-1] < LOOK_S:
            return True
        self._looked[:] = [time.monotonic()]
        try:
            self.check()
        except Lost:
            return False
        except OSError as error:
            logger.warning("could not read lease %s: %s", self.key[:12], error)
        return True

    def check(self) -> Table:
        """The table of the key. Raises Lost if another process has taken the lease over."""
        found = self.store.read(name_of(self.key)) or Table("", {}, "", 0.0)
        self._ours(found.value)
        return found

    def update(self, edit: Callable[[dict[str, Any]], Mapping[str, Any]], *, refers: Collection[str] = ()) -> Table:
        """Change the table of the key while the lease is ours, in one atomic step. Raises Lost otherwise.

        The holder is nearly the only writer, so the table that it wrote last is tried before it is read again.
        """
        found = self._latest()
        while True:
            value = edit(self._ours(dict(found.value)))
            try:
                self._known[:] = [self.store.write(name_of(self.key), value, found.version, refers=refers)]
                return self._known[-1]
            except Conflict:
                found = self.check()

    def save_work(self, folder: Path, **noted: Any) -> None:
        """Make a folder the newest checkpoint of the key. The one before is deleted once this one is in the table."""
        last = self._latest().value.get("work") or {}
        work = self.store.save_work(self.key, self.token, folder, last) | noted
        self.update(lambda value: value | {"work": work})
        self.store.drop_work(self.key, last, work)

    def commit(self, digest: str, out: Path, files: Files, record: Mapping[str, Any]) -> Table:
        """Store the folder `out` as an object, and the record that makes it the result of the key."""
        while True:
            self.store.add(digest, out, files)
            try:
                table = self.update(lambda value: value | {"record": dict(record)}, refers=[digest])
                break
            except Gone:  # removed by a collection, because this process stood still between the two
                if not out.exists():
                    raise
        remove_tree(out)
        return table

    def forget_work(self) -> None:
        """Remove the checkpoints of a key that has a result."""
        last = self._latest().value.get("work") or {}
        if last:
            self.update(lambda value: value | {"work": None})
            self.store.drop_work(self.key, last, {})

    def _latest(self) -> Table:
        return self._known[-1] if self._known else self.check()

    def _ours(self, value: dict[str, Any]) -> dict[str, Any]:
        holder = _owner(value)
        if holder is None or holder.token != self.token:
            rule = "took the lease over, because this process had not renewed it"
            raise Lost(f"lease {self.key[:12]}", "no process" if holder is None else str(holder), rule, "run again")
        return value


@contextmanager
def hold(store: Store, key: str, *, on_wait: Callable[[Owner], None] | None = None) -> Iterator[Lease]:
    """Hold the lease of `key`, after waiting until its owner releases it or has ended."""
    lease = _acquire(store, key, on_wait)
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(lease, stop), name=f"lease-{key[:8]}", daemon=True)
    heart.start()
    try:
        yield lease
    finally:
        stop.set()
        heart.join()
        try:
            with suppress(Lost):
                lease.update(lambda value: {name: one for name, one in value.items() if name != "lease"})
        except (ArtifactError, OSError) as error:  # what was done under it is done: others wait until it is silent
            logger.warning("could not release lease %s: %s", key[:12], error)


def living_owner(store: Store, key: str) -> Owner | None:
    """The process that computes `key`, as far as one look tells."""
    found = store.read(name_of(key))
    owner = None if found is None else _owner(found.value)
    if (
        found is None
        or owner is None
        or is_gone(owner)
        or (not _is_local(owner) and store.now() - found.written > TTL_S)
    ):
        return None
    return owner


def is_gone(owner: Owner) -> bool:
    """True if the owner was a process of this machine and has ended."""
    return _is_local(owner) and process_state(owner.pid, owner.pid_started) == "gone"


def _is_local(owner: Owner) -> bool:
    return (owner.host, owner.boot_id, owner.pid_namespace) == here()


def _may_be_silent(owner: Owner) -> bool:
    """False for another running process of this machine: a long call into a library does not cost it its lease.

    A lease of this process that is not renewed is one whose release failed: we run, so its heartbeats would.
    """
    if not _is_local(owner) or owner.pid == os.getpid():
        return True
    return process_state(owner.pid, owner.pid_started) == "stopped"


def _acquire(store: Store, key: str, on_wait: Callable[[Owner], None] | None) -> Lease:
    ours, waited, watch = ourselves(), False, _Watch()
    while True:
        found = store.read(name_of(key))
        value = {} if found is None else found.value
        holder = _owner(value)
        if holder is not None and holder.token == ours.token:  # our write was done and its answer lost
            return Lease(store, key, ours.token, waited)
        if holder is None or is_gone(holder) or (watch.is_over((holder.token, holder.beat)) and _may_be_silent(holder)):
            with suppress(Conflict):
                store.write(name_of(key), value | {"lease": asdict(ours)}, None if found is None else found.version)
                if holder is not None:
                    logger.warning("lease %s: %s is gone; taking over", key[:12], holder)
                return Lease(store, key, ours.token, waited)
            continue
        if not waited and on_wait is not None:
            on_wait(holder)
        waited = True
        time.sleep(POLL_S)


def _beat(lease: Lease, stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_S):
        try:
            lease.update(lambda value: value | {"lease": value["lease"] | {"beat": value["lease"]["beat"] + 1}})
        except Lost as error:
            logger.error("%s", error)
            return
        except (ArtifactError, OSError) as error:
            logger.warning("could not renew lease %s: %s", lease.key[:12], error)


class _Watch:
    """How long a lease has been unchanged, by the monotonic clock."""

    def __init__(self) -> None:
        self._seen: object = None
        self._looked, self._watched = time.monotonic(), 0.0

    def is_over(self, state: object) -> bool:
        """A long time between two looks counts as one heartbeat: what delayed us may have delayed the owner too."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        self._watched = self._watched + min(since, HEARTBEAT_S) if state == self._seen else 0.0
        self._seen = state
        return self._watched >= TTL_S


def _owner(value: Mapping[str, Any]) -> Owner | None:
    return Owner(**value["lease"]) if value.get("lease") else None


def ourselves() -> Owner:
    """This process as an owner, with a new token."""
    started = process_stat(os.getpid())
    return Owner(*here(), os.getpid(), -1 if started is None else started[1], secrets.token_hex(16))
