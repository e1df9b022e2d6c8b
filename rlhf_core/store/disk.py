"""A store in a folder that all of its processes see: one lock, tables as files, objects as folders."""

import errno
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError
from rlhf_core.store.disk_lock import alone, disk_time
from rlhf_core.store.layout import (
    MANIFEST,
    StoreLayout,
    folder_bytes,
    fsync_path,
    fsync_tree,
    make_folder,
    make_read_only,
    move,
    move_aside,
    remove_tree,
    write_bytes,
)
from rlhf_core.store.object_check import object_damage, write_manifest
from rlhf_core.store.protocol import (
    Conflict,
    Damaged,
    DamagedTable,
    Files,
    Gone,
    StoredObject,
    StoredTable,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

TRASH = "trash"
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)
GRACE_S = 3600.0
"""Longer than a commit takes between the object and its record."""
_LOCKED: ContextVar[frozenset[Path]] = ContextVar("_LOCKED", default=frozenset())
"""Stores whose lock this thread holds."""


class DiskStore:
    """The store in the folder `root`."""

    grace_s = GRACE_S
    folder_is_shared = True

    def __init__(self, root: Path) -> None:
        self.folder = Path(root).absolute()
        self.uri = str(self.folder)

    # ---------------------------------------------------------------- tables

    def read(self, name: str) -> StoredTable | None:
        """Read one file."""
        path = self._table(name)
        try:
            raw, written = path.read_bytes(), path.stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None
        value = unpack(raw)
        if value is None:
            rule = "has other content than was written"
            raise DamagedTable.of(name, f"{rule} ({path})")
        return StoredTable(name, value, raw[:64].decode(), written)

    def recent(self, name: str) -> StoredTable | None:
        """The same as `read`, because reading a file is cheap."""
        return self.read(name)

    def snapshot(self, *, within_s: float = 0.0) -> AbstractContextManager[None]:
        """No listing is needed, because reading a file is cheap."""
        return nullcontext()

    def write(
        self, name: str, value: Mapping[str, Any], expected: str | None, *, refers: Collection[str] = ()
    ) -> StoredTable:
        """Replace a file under the lock, after checking the objects that it refers to."""
        with self._lock():
            self._expect(name, expected)
            for digest in refers:
                if not self.has(digest):
                    raise Gone.object(digest, self.folder)
            raw, path = pack(value), self._table(name)
            _replace(path, raw, is_new=not path.exists())
            return StoredTable(name, dict(value), raw[:64].decode(), path.stat().st_mtime)

    def remove(self, name: str, expected: str) -> None:
        """Remove a file under the lock, durably."""
        with self._lock():
            self._expect(name, expected)
            self._table(name).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                fsync_path(self._table(name).parent)

    def tables(self, prefix: str, *, damaged: list[DamagedTable] | None = None) -> Iterator[StoredTable]:
        """The files below a folder, in the order of their names."""
        for name in self.versions(prefix):
            try:
                found = self.read(name)
            except DamagedTable as error:
                if damaged is None:
                    raise
                damaged.append(error)
                continue
            if found is not None:
                yield found

    def set_table_aside(self, name: str) -> None:
        """Move the file into quarantine."""
        with self._lock(), suppress(FileNotFoundError):
            if unpack(self._table(name).read_bytes()) is None:
                move_aside(self._table(name), self.folder / "quarantine")

    def versions(self, prefix: str) -> dict[str, str]:
        """Name of each table below a prefix -> a text that changes when the table is written. Reads no table."""
        top = self.folder / "tables"
        found = {}
        for parent, _, names in os.walk(top / prefix):
            for file in names:
                if file.endswith(".json") and not file.startswith("."):
                    path = Path(parent, file)
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        name = path.relative_to(top).as_posix().removesuffix(".json")
                        found[name] = f"{status.st_ino} {status.st_mtime_ns}"
        return dict(sorted(found.items()))

    def now(self, *, exact: bool = True) -> float:
        """The time of a new file: hosts that share the disk may have other clocks."""
        make_folder(self.folder)
        return disk_time(self.folder)

    # ---------------------------------------------------------------- objects

    def add(self, digest: str, folder: Path, files: Files) -> None:
        """Move the folder into the store, under the lock.

        A stored object that is damaged goes to quarantine, and this one takes its place. Raises Gone if the folder lacks
        files, because a process that took the key over has removed them.
        """
        target = self._object(digest)
        write_manifest(folder, files)
        fsync_tree(folder)
        make_folder(target.parent)
        with self._lock():
            if target.exists() and self._damage(digest, deep=True):
                self.set_aside(digest)
            if target.exists():
                os.utime(target)  # young again: no collection removes it before its record is written
            elif missing := [path for path in files if not (folder / path).is_file()]:
                remove_tree(folder)
                remedy = "run again: another process has removed what this one made"
                raise Gone("artifact", digest[:12], f"its file {missing[0]} is not in {folder}", remedy)
            else:
                move(folder, target)
                fsync_path(target.parent)
        make_read_only(target)

    def settle(self, digest: str, folder: Path, files: Files) -> None:
        """Nothing is left to do: `add` moved the folder into the store, unless the object was there."""

    def fetch(self, digest: str) -> Path:
        """The folder of the object itself. Only files that were written to since the last good check are hashed."""
        if not self.has(digest):
            raise Gone.object(digest, self.folder)
        damage = self._damage(digest, deep=False)
        if damage:
            raise Damaged("artifact", digest[:12], f"is damaged ({damage})", "run again to make it again")
        return self._object(digest)

    def has(self, digest: str) -> bool:
        """True if the object has a manifest, which is written before the object is moved into the store."""
        return (self._object(digest) / MANIFEST).is_file()

    def problem(self, digest: str, *, deep: bool = False) -> str:
        """A deep check that finds nothing sets the time of the last good check."""
        began = time.time()
        damage = self._damage(digest, deep=deep)
        if deep and not damage:  # the time of the manifest is the time of the last good check
            with suppress(OSError):  # this user may not write to the store
                os.utime(self._object(digest) / MANIFEST, (began, began))
        return damage

    def set_aside(self, digest: str) -> None:
        """Move the folder into quarantine."""
        with self._lock():
            if self._object(digest).exists():
                move_aside(self._object(digest), self.folder / "quarantine")

    def restore(self, digest: str) -> None:
        """Move the most recently quarantined folder back."""
        with self._lock():
            aside = sorted((self.folder / "quarantine").glob(f"{digest}.*"), key=lambda path: path.stat().st_mtime)
            if aside and not self._object(digest).exists():
                make_folder(self._object(digest).parent)
                move(aside[-1], self._object(digest))

    def delete_aside(self, before: float, *, dry_run: bool) -> Iterator[StoredObject]:
        """Delete files and folders in quarantine."""
        for path in sorted((self.folder / "quarantine").glob("*")):
            since = path.stat().st_mtime
            if since < before:
                yield StoredObject(str(path), "", since, condemned=True, bytes=folder_bytes(path))
                if not dry_run:
                    move_aside(path, self.folder / TRASH)

    # ---------------------------------------------------------------- unfinished work: all nodes see the folder itself

    def save_work(self, key: str, token: str, folder: Path, last: Mapping[str, Any]) -> dict[str, Any]:
        """Make the folder durable; all nodes see it."""
        fsync_tree(folder)
        for above in folder.parents[: len(folder.relative_to(self.folder).parts)]:
            fsync_path(above)
        return {"token": token, "folder": folder.relative_to(self.folder).as_posix()}

    def load_work(self, key: str, work: Mapping[str, Any]) -> Path:
        """The folder itself."""
        folder = self.folder / work["folder"]
        if not folder.is_dir():
            raise Gone("checkpoint", str(folder), "is gone", "use --force to start over")
        return folder

    def drop_work(self, key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Remove the earlier folder."""
        if before and before.get("folder") != now.get("folder"):
            remove_tree(self.folder / before["folder"])

    # ---------------------------------------------------------------- collection

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the lock of the store."""
        with self._lock():
            yield True

    def objects(self, but: Collection[str]) -> Iterator[StoredObject]:
        """The folders of objects. They count as marked: the lock replaces the mark."""
        for path in sorted((self.folder / "objects").glob("*/*")):
            if path.name not in but:
                status = path.stat()
                yield StoredObject(
                    path.name, str(status.st_ino), status.st_mtime, condemned=True, bytes=folder_bytes(path)
                )

    def condemn(self, one: StoredObject) -> bool:
        raise NotImplementedError("on a disk, a collection holds the lock and deletes at once")

    def delete(self, one: StoredObject) -> bool:
        """Move the folder out of the store in one step."""
        target = self._object(one.digest)
        moved = move_aside(target, self.folder / TRASH)  # the collection empties it, without the lock
        fsync_path(target.parent)
        return moved is not None

    def sweep(self, *, dry_run: bool) -> int:
        """Nothing: a folder is moved in one step, so no upload is ever cut off."""
        return 0

    # ---------------------------------------------------------------- private

    def _table(self, name: str) -> Path:
        return self.folder / "tables" / f"{name}.json"

    def _object(self, digest: str) -> Path:
        return StoreLayout(self.folder).object(digest)

    def _damage(self, digest: str, *, deep: bool) -> str:
        return object_damage(self._object(digest), deep=deep)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock of the store; a thread that holds it already passes."""
        held = _LOCKED.get()
        if self.folder in held:
            yield
            return
        with alone(self.folder / "locks"):
            token = _LOCKED.set(held | {self.folder})
            try:
                yield
            finally:
                _LOCKED.reset(token)

    def _expect(self, name: str, expected: str | None) -> None:
        """Raise Conflict if a table has another version."""
        found = self.read(name)
        if (None if found is None else found.version) != expected:
            raise Conflict(name)


def empty_trash(folder: Path) -> None:
    """Remove the files that a collection has moved out of the way in a store, or in the folder of a node."""
    for path in sorted((folder / TRASH).glob("*")):
        try:
            remove_tree(path)
        except ArtifactError as error:  # in a shared store, another user's private files
            logger.warning("store: %s", error)


def _replace(path: Path, raw: bytes, *, is_new: bool) -> None:
    """Replace a file atomically, and wait until it is on the disk. Raises Conflict if a new file exists.

    A host of a network file system may believe for some seconds that a file does not exist, also under the lock. A new file
    is therefore made by a link, which the server refuses if it has the name.
    """
    try:
        write_bytes(path, raw, durable=True, put=_link if is_new else Path.replace)
    except FileExistsError:
        raise Conflict(str(path)) from None


def _link(temporary: Path, path: Path) -> None:
    """Name a new file by a link, or by renaming it on a disk without links."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        temporary.replace(path)
    else:
        temporary.unlink()
