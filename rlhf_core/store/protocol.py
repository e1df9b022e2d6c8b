"""The protocol of a store: tables, objects and the unfinished work of attempts. `DiskStore` and `BucketStore` implement it.

A *table* is a small JSON value under a name. It changes only by compare-and-set. One table per key holds the whole shared
state of that key: lease, history of attempts, newest checkpoint and record. The write that commits a result therefore also
checks the lease, and a takeover cannot happen between the two.

An *object* is an immutable folder, named by the digest of its content.

Two rules make removal safe when many nodes share a store and none of them sees everything:

1. A write that refers to an object says so with `refers`. The store guarantees that the object outlives every collection
   that did not see the reference.
2. A compare-and-set decides that something is removed. Its bytes are deleted afterwards, under names that are never used
   again, so a collector that was suspended for a week deletes nothing that is in use.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhf_core.errors import ArtifactError
from rlhf_core.store.fingerprint import FileEntry

Files = Mapping[str, FileEntry]
"""Path inside a folder -> size and SHA-256."""


class Conflict(Exception):
    """A table is not at the expected version: another process has written it."""


class Gone(ArtifactError):
    """An object is not in the store."""

    @classmethod
    def object(cls, digest: str, where: object) -> "Gone":
        """The error for the object with this digest."""
        return cls("artifact", digest[:12], f"is not in {where}", "run again to make it again")


class Unreachable(ArtifactError, OSError):
    """The store did not answer, or its answer was cut off. The same request may succeed later."""


class Damaged(ArtifactError):
    """This node read other bytes than were stored, several times. Nothing was changed in the store."""


class DamagedTable(Damaged):
    """This node read a table with a wrong checksum, several times."""

    name: str

    @classmethod
    def of(cls, name: str, rule: str) -> "DamagedTable":
        """The error for the table of this name."""
        error = cls(
            "table", name, rule, "read it on another node; run `rlhf store verify --set-aside` if it is damaged"
        )
        error.name = name
        return error


@dataclass(frozen=True, slots=True)
class StoredTable:
    """A table at the time of reading. `written` is the time of its last write by the clock of the store."""

    name: str
    value: dict[str, Any]
    version: str
    written: float


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a collection sees it. `since`: when it was added or condemned, by the clock of the store."""

    digest: str
    version: str
    since: float
    condemned: bool
    bytes: int


class Store(Protocol):
    """A store that several nodes share. Methods may be called from several threads and processes."""

    uri: str
    """The address in a profile."""
    folder: Path
    """Folder of this node for the work of running attempts. On a disk it is the store itself."""
    folder_is_shared: bool
    """True if all nodes see `folder`, so unfinished work needs no copy."""
    grace_s: float
    """A collection keeps objects that were added or condemned less than this many seconds ago."""

    # tables
    def read(self, name: str) -> StoredTable | None:
        """The table with this name as of now; None if it does not exist."""

    def recent(self, name: str) -> StoredTable | None:
        """The table as of the snapshot that is open in this process; without a snapshot the same as `read`."""

    def snapshot(self, *, within_s: float = ...) -> AbstractContextManager[None]:
        """Let `recent` and `problem` use one listing inside the block instead of a request for each name.

        A listing that is not older than `within_s` seconds is used again.
        """

    def write(
        self, name: str, value: Mapping[str, Any], expected: str | None, *, refers: Collection[str] = ()
    ) -> StoredTable:
        """Replace the table if it is at version `expected` (None: if it does not exist); keep the objects it `refers` to.

        Raises Conflict, or Gone if an object is no longer in the store. In a bucket, Gone is raised after the write.
        """

    def remove(self, name: str, expected: str) -> None:
        """Remove the table if it is at version `expected`. Raises Conflict otherwise."""

    def tables(self, prefix: str, *, damaged: list[DamagedTable] | None = None) -> Iterator[StoredTable]:
        """All tables below a prefix. Tables written during the last `grace_s` seconds may be missing or outdated.

        Tables that cannot be read are added to `damaged`; without it, the first of them is raised.
        """

    def set_table_aside(self, name: str) -> None:
        """Keep the bytes of a table with a wrong checksum elsewhere, so that its key can be computed again."""

    def versions(self, prefix: str) -> dict[str, str]:
        """Name of each table below a prefix -> a text that changes when the table is written."""

    def now(self, *, exact: bool = True) -> float:
        """The time by the clock of the store; if not `exact`, it may be continued by this node's time since boot."""

    # objects
    def add(self, digest: str, folder: Path, files: Files) -> None:
        """Store a folder; another node may store the same one. On a disk the folder is moved."""

    def settle(self, digest: str, folder: Path, files: Files) -> None:
        """Take the folder of an object that was added and recorded into the cache of this node, where it has one."""

    def fetch(self, digest: str) -> Path:
        """A verified, read-only folder of this node with the object. Raises Gone, Damaged or Unreachable."""

    def has(self, digest: str) -> bool:
        """True if `fetch` would find the object."""

    def problem(self, digest: str, *, deep: bool = False) -> str:
        """A description of damage to an object in the store, or "". `deep` reads every byte of it."""

    def set_aside(self, digest: str) -> None:
        """Let the next commit store the object anew. Its present files are kept, unreadable under its digest."""

    def restore(self, digest: str) -> None:
        """Use the files again that `set_aside` kept last, unless the object has been stored anew."""

    def delete_aside(self, before: float, *, dry_run: bool) -> Iterator[StoredObject]:
        """Delete, or only list, the files of objects and tables that were set aside before this time."""

    # unfinished work
    def save_work(self, key: str, token: str, folder: Path, last: Mapping[str, Any]) -> dict[str, Any]:
        """Make a folder that attempt `token` has written readable for other nodes; returns the entry for the key's table.

        `last` is the previous entry: files that did not change are not stored twice.
        """

    def load_work(self, key: str, work: Mapping[str, Any]) -> Path:
        """A folder of this node with the work that a key's table names. Raises Gone, Damaged or Unreachable."""

    def drop_work(self, key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Delete the files of the work `before` that `now` no longer has. Call it after the table was written."""

    # collection
    def alone(self) -> AbstractContextManager[bool]:
        """Yield True if nobody else can change the store inside the block (a disk), False in a bucket."""

    def objects(self, but: Collection[str]) -> Iterator[StoredObject]:
        """The objects of the store except those in `but`."""

    def condemn(self, one: StoredObject) -> bool:
        """Mark an object for a later collection; False if it has changed since it was listed."""

    def delete(self, one: StoredObject) -> bool:
        """Remove an object; False if it has changed since it was listed."""

    def sweep(self, *, dry_run: bool) -> int:
        """Delete files that no table names, left by interrupted uploads. Returns their number."""


def update(
    store: Store, name: str, edit: Callable[[dict[str, Any]], Mapping[str, Any]], *, refers: Collection[str] = ()
) -> StoredTable:
    """Replace a table by the result of `edit`, as one atomic step. `edit` may be called several times, or raise."""
    while True:
        found = store.read(name)
        value = edit({} if found is None else dict(found.value))
        try:
            return store.write(name, value, None if found is None else found.version, refers=refers)
        except Conflict:
            continue


def discard(store: Store, name: str) -> None:
    """Remove a table in any version; it may not exist."""
    while (found := store.read(name)) is not None:
        with suppress(Conflict):
            store.remove(name, found.version)


# ---------------------------------------------------------------- the bytes of a table, the same in a file and in a bucket


def pack(value: Mapping[str, Any]) -> bytes:
    """The bytes of a table. A random member makes each write unique, so a write with a lost response can be recognized."""
    body = json.dumps({"put": secrets.token_hex(8), "value": dict(value)}, sort_keys=True)
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}".encode()


def unpack(raw: bytes) -> dict[str, Any] | None:
    """The value in the bytes of a table; None if its checksum does not match."""
    digest, _, body = raw.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        return None
    value: dict[str, Any] = json.loads(body)["value"]
    return value
