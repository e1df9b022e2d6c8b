"""The table of a key: its lease, the history of its attempts, its newest checkpoint and its record.

    lease      owner with a random token, and a counter that each heartbeat raises; missing if nobody computes the key
    attempts   the history: number, status and inputs of each attempt
    work       the newest checkpoint that other nodes can read (`Store.save_work`)
    record     the result; the key has a result only from this write on

The holder of a lease changes the table with `Lease.update` alone. The compare-and-set that writes also checks the token, so a
process that has lost its lease without noticing can neither commit nor replace a checkpoint.

No clock decides about a lease. A waiting process takes it over if the owner is a process of this machine that has ended, or if
the waiting process has watched the lease for `TTL_S` by its monotonic clock without seeing a heartbeat.
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
from types import MappingProxyType
from typing import Any

from rlhf_core.errors import ArtifactError
from rlhf_core.processes.identity import here, process_stat, process_state
from rlhf_core.store.layout import remove_tree
from rlhf_core.store.protocol import Conflict, Files, Gone, Store, StoredTable

logger = logging.getLogger(__name__)

TTL_S = 120.0  # six heartbeats
HEARTBEAT_S = 20.0
POLL_S = 0.25
LOOK_S = 1.0
"""`Lease.fence` reads the table at most this often."""
_HELD: set[str] = set()
"""Tokens of the leases that this process holds now."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The holder of a lease. Each heartbeat raises `beat`."""

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
        """Describe the owner to a waiting process. A process of another machine may have ended unseen."""
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
    """The right of this process to compute `key`."""

    store: Store
    key: str
    token: str
    _looked: list[float] = field(default_factory=list, compare=False, repr=False)
    _known: list[StoredTable] = field(default_factory=list, compare=False, repr=False)
    _ended: list[bool] = field(default_factory=list, compare=False, repr=False)
    """Not empty from the commit on: a thread that still uploads a checkpoint must not replace the work of the result."""

    def fence(self) -> None:
        """Raise Lost if another process has taken the lease over. An unreachable store passes: commits check again."""
        if self._looked and time.monotonic() - self._looked[-1] < LOOK_S:
            return
        try:
            self.check()
        except OSError as error:
            logger.warning("could not read lease %s: %s", self.key[:12], error)
        self._looked[:] = [time.monotonic()]

    def check(self) -> StoredTable:
        """The table of the key as of now. Raises Lost if another process has taken the lease over."""
        found = self.store.read(name_of(self.key)) or StoredTable("", {}, "", 0.0)
        self._ours(found.value)
        return found

    def latest(self) -> StoredTable:
        """The table as this process last read or wrote it under the lease. The holder is nearly the only writer."""
        if not self._known:
            self._known[:] = [self.check()]
        return self._known[-1]

    def update(
        self, edit: Callable[[dict[str, Any]], Mapping[str, Any]], *, refers: Collection[str] = ()
    ) -> StoredTable:
        """Change the table of the key in one atomic step, if the lease is still ours. Raises Lost otherwise."""
        found = self.latest()
        while True:
            value = edit(self._ours(dict(found.value)))
            try:
                self._known[:] = [self.store.write(name_of(self.key), value, found.version, refers=refers)]
                return self._known[-1]
            except Conflict:
                found = self.check()
            except Gone:  # in a bucket it is raised after the write
                self._known.clear()
                raise

    def save_work(self, folder: Path, **noted: Any) -> None:
        """Make a folder the newest checkpoint of the key. The previous one is deleted once the table names this one.

        After the commit of this process, the table stays unchanged.
        """
        last = self.latest().value.get("work") or {}
        work = self.store.save_work(self.key, self.token, folder, last) | noted
        saved = self.update(lambda value: value if self._ended else value | {"work": work})
        if saved.value.get("work") == work:
            self.store.drop_work(self.key, last, work)

    def load_work(self, work: Mapping[str, Any]) -> Path:
        """The folder of this node with a checkpoint that the table names. Raises Lost, Gone, Damaged or Unreachable."""
        try:
            return self.store.load_work(self.key, work)
        except Gone:
            self.check()  # raises Lost if another process, which has taken the lease over, removed the files
            raise

    def commit(
        self,
        digest: str,
        out: Path,
        files: Files,
        record: Mapping[str, Any],
        *,
        work: Mapping[str, Any] = MappingProxyType({}),
        when_added: Callable[[], None] = lambda: None,
    ) -> StoredTable:
        """Store the folder `out` as an object, and the record that makes it the result of the key.

        `when_added` is called between the two. The checkpoints are removed; `work` names the files that stay with the result.
        """
        done = {"record": dict(record)} | ({"work": dict(work)} if work else {})
        self._ended.append(True)
        while True:
            try:
                self.store.add(digest, out, files)
            except Gone:
                self.check()  # raises Lost if another process, which has taken the lease over, removed the folder
                raise
            try:
                when_added()
                last = self.latest().value.get("work") or {}
                table = self.update(lambda value: without(value, "aside", "work") | done, refers=[digest])
                break
            except Gone:  # removed by a collection, because this process stood still between the two
                if not out.exists():
                    raise
        self.store.settle(digest, out, files)
        remove_tree(out)
        self.store.drop_work(self.key, last, work)
        return table

    def forget_work(self, *, after: int = 0) -> None:
        """Remove the checkpoints of the attempts `after` this number: a later one has left a result, or starts over."""
        last = self.latest().value.get("work") or {}
        if last and last.get("attempt", after + 1) > after:
            self.update(lambda value: without(value, "work"))
            self.store.drop_work(self.key, last, {})

    def _ours(self, value: dict[str, Any]) -> dict[str, Any]:
        """The value of the table, if its lease is ours. Raises Lost otherwise."""
        holder = owner_in(value)
        if holder is None or holder.token != self.token:
            rule = "took the lease over, because this process had not renewed it"
            raise Lost(f"lease {self.key[:12]}", "no process" if holder is None else str(holder), rule, "run again")
        return value


@contextmanager
def hold(store: Store, key: str, *, on_wait: Callable[[Owner], None] | None = None) -> Iterator[Lease]:
    """Hold the lease of `key`, after waiting until its owner has released it or has ended."""
    ours = ourselves()
    _HELD.add(ours.token)  # first: another thread of this process may look at the lease as soon as it is written
    try:
        lease = _acquire(store, key, ours, on_wait)
    except BaseException:
        _HELD.discard(ours.token)
        raise
    stop = threading.Event()
    heart = threading.Thread(target=_beat, args=(lease, stop), name=f"lease-{key[:8]}", daemon=True)
    heart.start()
    try:
        yield lease
    finally:
        stop.set()
        heart.join()
        _HELD.discard(lease.token)  # even if the release fails, this process never waits for itself
        try:
            with suppress(Lost):
                lease.update(lambda value: without(value, "lease"))
        except (ArtifactError, OSError) as error:  # the result is stored: others wait until the lease is silent
            logger.warning("could not release lease %s: %s", key[:12], error)


def living_owner(store: Store, key: str, *, fresh: bool = False) -> Owner | None:
    """The process that computes `key`, as far as one look can tell: now if `fresh`, else as of the last listing."""
    found = store.read(name_of(key)) if fresh else store.recent(name_of(key))
    owner = None if found is None else owner_in(found.value)
    if found is None or owner is None or is_gone(owner) or _is_left(owner):
        return None
    if not _is_local(owner) and store.now(exact=False) - found.written > TTL_S:
        return None
    return owner


def is_gone(owner: Owner) -> bool:
    """True if the owner was a process of this machine and has ended."""
    return _is_local(owner) and process_state(owner.pid, owner.pid_started) == "gone"


def owner_in(value: Mapping[str, Any]) -> Owner | None:
    """The owner in the value of a key's table."""
    return Owner(**value["lease"]) if value.get("lease") else None


def without(value: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The value of a table without some of its members."""
    return {one: content for one, content in value.items() if one not in names}


def ourselves() -> Owner:
    """This process as an owner, with a new token."""
    started = process_stat(os.getpid())
    return Owner(*here(), os.getpid(), -1 if started is None else started[1], secrets.token_hex(16))


def _is_local(owner: Owner) -> bool:
    return (owner.host, owner.boot_id, owner.pid_namespace) == here()


def _is_left(owner: Owner) -> bool:
    """True for a lease of this process whose release failed."""
    return _is_local(owner) and owner.pid == os.getpid() and owner.token not in _HELD


def _may_be_silent(owner: Owner) -> bool:
    """False for another running process of this machine: a long call into a library does not cost it its lease."""
    return not _is_local(owner) or process_state(owner.pid, owner.pid_started) == "stopped"


def _acquire(store: Store, key: str, ours: Owner, on_wait: Callable[[Owner], None] | None) -> Lease:
    """Write a lease into the table of the key, as soon as it has none or its owner has ended or fallen silent."""
    waited, watch = False, _Watch()
    while True:
        found = store.read(name_of(key))
        value = {} if found is None else found.value
        holder = owner_in(value)
        if (
            found is not None and holder is not None and holder.token == ours.token
        ):  # our write was done, its answer lost
            return Lease(store, key, ours.token, _known=[found])
        is_free = holder is None or is_gone(holder) or _is_left(holder)
        if is_free or (holder and watch.is_over((holder.token, holder.beat)) and _may_be_silent(holder)):
            with suppress(Conflict):
                new = value | {"lease": asdict(ours)}
                table = store.write(name_of(key), new, None if found is None else found.version)
                if holder is not None:
                    logger.warning("lease %s: %s is gone; taking over", key[:12], holder)
                return Lease(store, key, ours.token, _known=[table])
            continue
        if holder and not waited and on_wait is not None:
            on_wait(holder)
        waited = True
        time.sleep(POLL_S)


def _beat(lease: Lease, stop: threading.Event) -> None:
    """Raise the counter of the lease, so that processes on other machines see that this one lives."""
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
        """Whether the lease has expired. A long pause between looks counts as one heartbeat: the owner may lag, too."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        self._watched = self._watched + min(since, HEARTBEAT_S) if state == self._seen else 0.0
        self._seen = state
        return self._watched >= TTL_S
