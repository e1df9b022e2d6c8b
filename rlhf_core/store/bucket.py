"""A store in a bucket. The bucket is the source of truth; this node's folder is a cache, verified whenever it is read.

    tables/<name>                       a table (lease, attempts and record of a key; pins, gates, labels, ...)
    objects/<digest>                    a table: the files of an object, and the generation that they lie in
    data/<digest>-<generation>/<sha>    the files of an object
    work/<key>/<owner>/<sha>            files of checkpoints; the owner begins with the token of the attempt that wrote them
    clock                               written to learn the time of the server

A generation is a random name. It enters the table of its object before the first file is uploaded. Once it has left that table
it never enters again, so files of a generation that the table does not name may be deleted at any time.
"""

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.processes.identity import here
from rlhf_core.store.checkpoint_parts import Parts, UploadedFile
from rlhf_core.store.fingerprint import FileEntry, hash_file, list_files, sha256_text, tree_digest
from rlhf_core.store.layout import (
    is_inside,
    make_folder,
    read_json,
    remove_tree,
    sweep_temporaries,
    temporary_for,
    write_json,
)
from rlhf_core.store.node_cache import NodeCache, settle_copy
from rlhf_core.store.object_check import object_damage, write_manifest
from rlhf_core.store.object_server import PATIENCE_S, RETRY_S, ObjectServer, repeat
from rlhf_core.store.protocol import (
    Conflict,
    Damaged,
    DamagedTable,
    Files,
    Gone,
    StoredObject,
    StoredTable,
    Unreachable,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item")
GRACE_S = 86_400.0
"""Longer than any listing is outdated, and than a node may take from the upload of an object to its record."""
TRIES = 3
"""Downloads with a wrong checksum after which this node reports damage."""
THREADS = 16
FRESH_S = 1.0
"""How old a listing may be that a snapshot uses."""
RECENT_S = 30.0
"""How long a listing, or a look at a table, answers `recent`."""
CLOCK_S = 3600.0
"""How long the time of the server is continued by this node's time since boot where it need not be exact."""
_REMOVED = {"removed": True}
"""A removed table. Servers cannot delete on a condition, so this value takes its place."""
_NO_OBJECT: dict[str, Any] = {"live": "", "pending": [], "aside": [], "condemned": False}
"""The table of an object that is not in the store."""


class BucketStore:
    """The store behind `server`; this node keeps its cache in the folder `cache`."""

    grace_s = GRACE_S
    folder_is_shared = False

    def __init__(self, server: ObjectServer, cache: Path, uri: str = "") -> None:
        self.server, self.folder, self.uri = server, Path(cache).absolute(), uri
        self._copies = NodeCache(self.folder)
        self._listed: dict[str, StoredTable] = {}
        """Tables by full name as last listed, read or written."""
        self._unreadable: list[DamagedTable] = []
        """Tables of the last listing that cannot be read."""
        self._listings: list[dict[str, StoredTable | None]] = []
        """Tables that were read or written during each listing in progress."""
        self._listed_at = -RECENT_S
        self._looked_at: dict[str, float] = {}
        """Name of a table -> when it was read or written since the last listing."""
        self._snapshots = 0
        self._threads = threading.RLock()

    # ---------------------------------------------------------------- tables

    def read(self, name: str) -> StoredTable | None:
        """One GET."""
        found = self._get(name)
        table = None if found is None else found[1]
        self._note(name, table)
        return _existing(table)

    def recent(self, name: str) -> StoredTable | None:
        """No request while a listing, or a look at this table, is recent, except for a table that was missing."""
        with self._threads:
            known, is_open = self._listed.get(name), bool(self._snapshots)
            is_recent = time.monotonic() - self._looked_at.get(name, self._listed_at) < RECENT_S
        if is_open or (is_recent and _existing(known) is not None):  # a table that was missing may exist by now
            return _existing(known)
        return self.read(name)

    @contextmanager
    def snapshot(self, *, within_s: float = FRESH_S) -> Iterator[None]:
        """Two LISTs, unless the last ones are recent, and a GET for each table that this node does not have."""
        if (not self._snapshots or not within_s) and time.monotonic() - self._listed_at > within_s:
            self._list_all()
        with self._threads:
            self._snapshots += 1
        try:
            yield
        finally:
            with self._threads:
                self._snapshots -= 1

    def write(
        self, name: str, value: Mapping[str, Any], expected: str | None, *, refers: Collection[str] = ()
    ) -> StoredTable:
        """One PUT, and a GET of the table of each object that the write refers to."""
        written = self._write(name, value, expected)
        for digest in refers:  # after the write: a collection that did not see it has marked the object before
            self._keep(digest)
        return written

    def remove(self, name: str, expected: str) -> None:
        """One PUT of a value that marks the table as removed."""
        self._write(name, _REMOVED, expected)

    def tables(self, prefix: str, *, damaged: list[DamagedTable] | None = None) -> Iterator[StoredTable]:
        """One LIST for 1,000 tables, and a GET for each that this node has not read at its present version."""
        yield from filter(_existing, self._tables(prefix, damaged))

    def set_table_aside(self, name: str) -> None:
        """Copy the damaged bytes to `quarantine/`, and free the name."""
        raw, version, _ = self._again(lambda: self.server.get(_place(name)))
        if unpack(raw) is None:
            self.server.put(f"quarantine/{name}.{secrets.token_hex(4)}", raw, None)
            self.server.put(_place(name), pack(_REMOVED), version)

    def versions(self, prefix: str) -> dict[str, str]:
        """Name of each table below a prefix -> its version. Removed tables are among them."""
        return {name: version for name, version, _ in self._list(prefix)}

    def now(self, *, exact: bool = True) -> float:
        """One PUT and one HEAD, or a file of this node if the time need not be exact.

        The time since boot also advances while the machine is suspended, and nobody can set it.
        """
        note, since_boot = self.folder / "cache" / "clock.json", time.clock_gettime(time.CLOCK_BOOTTIME)
        known = None if exact else read_json(note)
        if known is not None and known["boot"] == here()[1] and 0 <= since_boot - known["at"] < CLOCK_S:
            return float(known["server"] + since_boot - known["at"])
        server = self._again(lambda: self.server.touch("clock"))
        if not exact:
            write_json(note, {"boot": here()[1], "at": since_boot, "server": server}, durable=False)
        return server

    # ---------------------------------------------------------------- objects

    def add(self, digest: str, folder: Path, files: Files) -> None:
        """Upload the files under a new generation, and make it the live one.

        An object that is already stored costs one GET. The mark of a collection is cleared, so the object outlives it.
        """
        name, mine = f"objects/{digest}", ""
        listed = {path: [entry.size, entry.sha256] for path, entry in files.items()}
        while True:
            found = self.read(name)
            version = None if found is None else found.version
            state = _NO_OBJECT if found is None else found.value
            with suppress(Conflict):
                if state["live"] and not state["condemned"]:
                    return
                if state["live"]:
                    self._write(name, state | {"condemned": False}, version)
                elif mine and mine in state["pending"]:
                    pending = [one for one in state["pending"] if one != mine]
                    live = {"files": listed, "live": mine, "pending": pending, "condemned": False}
                    self._write(name, state | live, version)
                else:
                    mine = secrets.token_hex(8)
                    self._write(name, state | {"pending": [*state["pending"], mine]}, version)
                    self._upload(f"data/{digest}-{mine}/", {folder / path: one.sha256 for path, one in files.items()})

    def settle(self, digest: str, folder: Path, files: Files) -> None:
        """Take the folder of a stored object into the cache; the next stage need not download it."""
        copy = self._copies.object(digest)
        with self._copies.filling(copy):
            if not copy.exists():
                make_folder(copy.parent)
                write_manifest(folder, files)
                settle_copy(folder, copy)
        self._copies.evict()

    def fetch(self, digest: str) -> Path:
        """The copy in this node's cache, downloaded if it is missing or damaged. Other processes of the node wait meanwhile."""
        return self._cached_copy(self._copies.object(digest), lambda part: self._download_object(digest, part))

    def _cached_copy(self, copy: Path, download: Callable[[Path], Files]) -> Path:
        """A folder of this node's cache. If it is missing or damaged, `download` writes its files into a new folder."""
        with self._copies.filling(copy):
            damage = object_damage(copy, deep=False) if copy.exists() else "is missing"
            if not damage:
                return copy
            if copy.exists():
                logger.warning("store: the copy of object %s on this node is damaged: %s", copy.name[:12], damage)
                remove_tree(copy)
            part = self.scratch()
            try:
                write_manifest(part, download(part))
                make_folder(copy.parent)
                return settle_copy(part, copy)
            finally:
                remove_tree(part)

    def _download_object(self, digest: str, part: Path) -> Files:
        """Download the files of an object, at most three times if a collection interferes."""
        for _ in range(TRIES):
            state = self._live(digest).value
            files = {path: FileEntry(*entry) for path, entry in state["files"].items()}
            if tree_digest(files) != digest or not all(map(is_inside, files)):
                rule = "has a list of files with another digest"
                raise Damaged("artifact", digest[:12], rule, "run `rlhf store verify`")
            self._copies.evict(sum(one.size for one in files.values()))
            try:
                self._download(_data_files(digest, state), part)
            except FileNotFoundError:  # collected, and perhaps added again, since its table was read
                remove_tree(part)
                continue
            return files
        raise Gone("artifact", digest[:12], f"has no files in {self.uri}", "run `rlhf store verify`")

    def has(self, digest: str) -> bool:
        """One GET."""
        return self._object(digest) is not None

    def problem(self, digest: str, *, deep: bool = False) -> str:
        """Without `deep` the table of the object says whether it is there. It is read anew before the answer is no."""
        known = None if deep else self.recent(f"objects/{digest}")
        if known is not None and known.value["live"]:
            return ""
        found = self._object(digest)
        if found is None:
            return f"is not in {self.uri}"
        if not deep:
            return ""
        part = self.scratch()
        try:
            self._download(_data_files(digest, found.value), part)
        except FileNotFoundError as error:
            return f"has lost a file ({error})"
        except Damaged as error:
            return str(error).partition(": ")[2].partition(";")[0]
        finally:
            remove_tree(part)
        return ""

    def set_aside(self, digest: str) -> None:
        """Make the live generation unreadable under the digest, without deleting a file."""
        found = self._object(digest)
        if found is not None:
            aside = [*found.value.get("aside", ()), found.value["live"]]
            self._write(found.name, found.value | {"live": "", "aside": aside}, found.version)

    def restore(self, digest: str) -> None:
        """Make the generation live again that was set aside last."""
        found = self.read(f"objects/{digest}")
        if found is not None and not found.value["live"] and found.value.get("aside"):
            *aside, live = found.value["aside"]
            self._write(found.name, found.value | {"live": live, "aside": aside}, found.version)

    def delete_aside(self, before: float, *, dry_run: bool) -> Iterator[StoredObject]:
        """Remove the generations from the tables of their objects first, and delete their files afterwards.

        Tables that cannot be read are passed over.
        """
        for table in self.tables("objects/", damaged=[]):
            digest, state = table.name.partition("/")[2], table.value
            aside = state.get("aside", [])
            if aside and table.written < before:
                one = StoredObject(
                    digest, table.version, table.written, condemned=True, bytes=_size(state) * len(aside)
                )
                if dry_run or self._mark(one, lambda state: state | {"aside": []}) is not None:
                    yield one
                    self._delete_generations(digest, () if dry_run else aside)
        for name, version, written, size in self._again(lambda: list(self.server.list("quarantine/"))):
            if written < before:
                yield StoredObject(name, version, written, condemned=True, bytes=size)
                self._delete(() if dry_run else [name])

    def _delete_generations(self, digest: str, generations: Iterable[str]) -> None:
        """Delete files of an object under generations that its table names no longer."""
        for one in generations:
            self._delete(self._names(f"data/{digest}-{one}/"))

    def _object(self, digest: str) -> StoredTable | None:
        """The table of an object as of now; None if the object is not in the store."""
        found = self.read(f"objects/{digest}")
        return found if found is not None and found.value["live"] else None

    def _live(self, digest: str) -> StoredTable:
        """The table of an object. Raises Gone if the object is not in the store."""
        found = self._object(digest)
        if found is None:
            raise Gone.object(digest, self.uri)
        return found

    def _keep(self, digest: str) -> None:
        """Clear the mark of a collection, so that no later one deletes the object. Raises Gone if it is deleted."""
        while True:
            found = self._live(digest)
            if not found.value["condemned"]:
                return
            with suppress(Conflict):
                self._write(found.name, found.value | {"condemned": False}, found.version)

    # ---------------------------------------------------------------- unfinished work

    def save_work(
        self, key: str, token: str, folder: Path, last: Mapping[str, Any], only: Collection[str] = ()
    ) -> dict[str, Any]:
        """Upload the files whose content the last checkpoint did not have."""
        there = {entry[1]: entry for entry in last.get("files", {}).values()}
        return {"token": token, "files": self.send(folder, key, token, there, only)}

    def load_work(self, key: str, work: Mapping[str, Any]) -> Path:
        """Files that ranks on other nodes have uploaded (`apart`) stay in the bucket until a rank needs them."""
        folder = self.scratch()
        self.receive(folder, key, work["files"])
        return folder

    def drop_work(self, key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Delete by the names of owner and content, which a later checkpoint never has again."""
        self._delete(sorted(_work_names(key, before) - _work_names(key, now)))

    def send(self, folder: Path, key: str, owner: str, there: Parts, only: Collection[str] = ()) -> Parts:
        """Upload the files of a folder, or `only` these, as unfinished work, except for content that is `there`."""
        digests = {path: hash_file(folder / path) for path in only or list_files(folder)}
        new = {folder / path: sha for path, sha in digests.items() if sha not in there}
        self._upload(f"work/{key}/{owner}/", new)
        return {
            path: there[sha] if sha in there else ((folder / path).stat().st_size, sha, owner)
            for path, sha in digests.items()
        }

    def receive(self, folder: Path, key: str, files: Parts) -> None:
        """Download files of unfinished work into a folder. Raises Gone or Damaged."""
        if outside := [path for path in files if not is_inside(path)]:
            raise Damaged("checkpoint", outside[0], "is not a path inside a work folder", "use --force to start over")
        try:
            self._download({path: _work_name(key, entry) for path, entry in files.items()}, folder)
        except FileNotFoundError as error:
            raise Gone("checkpoint", key[:12], f"has lost a file ({error})", "use --force to start over") from None

    def gather(self, key: str, files: Parts) -> Path:
        """A folder of this node's cache with files of unfinished work, verified. Raises Gone or Damaged."""
        entries = {path: FileEntry(size, sha) for path, (size, sha, _) in files.items()}

        def download(part: Path) -> Files:
            self._copies.evict(sum(one.size for one in entries.values()))
            self.receive(part, key, files)
            return entries

        return self._cached_copy(self._copies.object(tree_digest(entries)), download)

    def scratch(self) -> Path:
        """A new folder of this node, which the caller removes. Folders of processes that were killed are removed here."""
        root = self.folder / "scratch"
        root.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(root)
        made = temporary_for(root / "part")
        made.mkdir()
        return made

    # ---------------------------------------------------------------- collection

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield False

    def objects(self, but: Collection[str]) -> Iterator[StoredObject]:
        """All objects with files, also files that were set aside or whose upload was cut off."""
        for table in self.tables("objects/"):
            digest, state = table.name.partition("/")[2], table.value
            if digest not in but and _generations(state):
                yield StoredObject(digest, table.version, table.written, state["condemned"], _size(state))

    def condemn(self, one: StoredObject) -> bool:
        """Mark the version that was listed, and no other."""
        return self._mark(one, lambda state: state | {"condemned": True}) is not None

    def delete(self, one: StoredObject) -> bool:
        """Remove the table of an object first, and then the files of the generations that it named."""
        before = self._mark(one, lambda state: _NO_OBJECT)
        self._delete_generations(one.digest, () if before is None else _generations(before))
        return before is not None

    def _mark(self, one: StoredObject, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any] | None:
        """Change the table of an object if it is at the listed version; its value before, or None."""
        found = self.read(f"objects/{one.digest}")
        if found is None or found.version != one.version:
            return None
        try:
            self._write(found.name, edit(found.value), one.version)
        except Conflict:
            return None
        return found.value

    def sweep(self, *, dry_run: bool) -> int:
        """Files are listed before tables are read: a table names a generation before its first file exists."""
        dead: list[str] = []
        for prefix, is_named in (("data/", self._is_generation), ("work/", self._is_work)):
            listed = [name.removeprefix(prefix).rpartition("/") for name in self._names(prefix)]
            named = {folder for folder in {folder for folder, *_ in listed} if is_named(folder)}
            dead += [f"{prefix}{folder}/{file}" for folder, _, file in listed if folder not in named]
        if not dry_run:
            self._delete(dead)
        return len(dead)

    def _is_generation(self, folder: str) -> bool:
        """True if the table of the object names this generation now."""
        digest, _, generation = folder.partition("-")
        found = (read(f"objects/{digest}") for read in (self.recent, self.read))
        return any(table is not None and generation in _generations(table.value) for table in found)

    def _is_work(self, folder: str) -> bool:
        """True if the table of the key names this owner now, as its lease or in its checkpoint."""
        key, _, owner = folder.partition("/")
        found = self.read(f"keys/{key}")
        value = {} if found is None else found.value
        names = _work_names(key, value.get("work") or {})
        is_lease = owner.partition(".")[0] == (value.get("lease") or {}).get("token")
        return is_lease or any(name.startswith(f"work/{folder}/") for name in names)

    # ---------------------------------------------------------------- requests

    def _list_all(self) -> None:
        """List all tables anew. Nothing is locked meanwhile: heartbeats of leases must not wait for a listing."""
        began = time.monotonic()
        newer: dict[str, StoredTable | None] = {}
        unreadable: list[DamagedTable] = []
        with self._threads:
            self._listings.append(newer)
        try:
            found = {
                table.name: table for prefix in ("", "objects/") for table in self._list_tables(prefix, unreadable)
            }
        finally:
            with self._threads:
                self._listings = [one for one in self._listings if one is not newer]
        with self._threads:
            kept = {name: table for name, table in (found | newer).items() if table is not None}
            self._listed, self._unreadable, self._listed_at, self._looked_at = kept, unreadable, began, {}

    def _note(self, name: str, table: StoredTable | None) -> None:
        """Add this table to the last listing, and to listings in progress."""
        with self._threads:
            for newer in self._listings:
                newer[name] = table
            self._looked_at[name] = time.monotonic()
            if table is None:
                self._listed.pop(name, None)
            else:
                self._listed[name] = table

    def _get(self, name: str) -> tuple[bytes, StoredTable] | None:
        """The bytes and the table of this name. Raises Damaged if they differ from the written ones."""
        for _ in range(TRIES):
            try:
                raw, version, written = self._again(lambda: self.server.get(_place(name)))
            except FileNotFoundError:
                return None
            value = unpack(raw)
            if value is not None:
                return raw, StoredTable(name, value, version, written)
        raise DamagedTable.of(name, "does not arrive with the checksum that it was written with")

    def _write(self, name: str, value: Mapping[str, Any], expected: str | None) -> StoredTable:
        """Put a table on a condition. A put whose response was lost is recognized by the random member of its bytes."""
        raw = pack(value)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                version = self.server.put(_place(name), raw, expected)
                # Its time is the server's time, which the response lacks: just now.
                table = StoredTable(name, dict(value), version, math.inf)
                self._note(name, table)
                return table
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
            except Conflict:
                pass
            # Our own put may have been carried out although its answer was lost.
            there = self._get(name)
            if there is not None and there[0] == raw:
                self._note(name, there[1])
                return there[1]
            if there is not None and expected is None and there[1].value == _REMOVED:
                expected = there[1].version
            elif (None if there is None else there[1].version) != expected or time.monotonic() > deadline:
                raise Conflict(name)
            else:  # another put is in progress
                time.sleep(RETRY_S / 40)

    def _tables(self, prefix: str, damaged: list[DamagedTable] | None = None) -> Iterator[StoredTable]:
        """The tables below a prefix as of the open snapshot, or of a new listing; also removed ones."""
        with self._threads:
            is_open, listed, unreadable = bool(self._snapshots), dict(self._listed), list(self._unreadable)
        if not is_open:
            yield from self._list_tables(prefix, damaged)
            return
        for error in unreadable:
            if _place(error.name).startswith(_place(prefix)):
                if damaged is None:
                    raise error
                damaged.append(error)
        yield from (table for name, table in listed.items() if _place(name).startswith(_place(prefix)))

    def _list_tables(self, prefix: str, damaged: list[DamagedTable] | None) -> Iterator[StoredTable]:
        """The listed tables, read by several threads where this node does not have them."""

        def get(one: tuple[str, str, float]) -> StoredTable | None:
            try:
                return self._cached(*one)
            except DamagedTable as error:
                if damaged is None:
                    raise
                damaged.append(error)
                return None

        yield from (table for table in _each(get, self._list(prefix)) if table is not None)

    def _list(self, prefix: str) -> list[tuple[str, str, float]]:
        """Name, version and time of the last write of the tables below a prefix."""
        listed = self._again(lambda: list(self.server.list(_place(prefix))))
        return [(name.removeprefix("tables/"), version, written) for name, version, written, _ in listed]

    def _cached(self, name: str, version: str, written: float) -> StoredTable | None:
        """The table at a listed version, from the cache of this node if that holds exactly these bytes."""
        path = self.folder / "cache" / f"{sha256_text(_place(name))[:32]}.table"
        with suppress(FileNotFoundError):
            noted, _, raw = path.read_bytes().partition(b"\n")
            value = unpack(raw) if noted.decode("utf-8", "replace") == version else None
            if value is not None:
                return StoredTable(name, value, version, written)
        found = self._get(name)
        if found is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{secrets.token_hex(4)}")
        part.write_bytes(found[1].version.encode() + b"\n" + found[0])
        part.replace(path)
        return found[1]

    def _delete(self, names: Collection[str]) -> None:
        """Delete files, with several threads."""
        _each(lambda name: self._again(lambda: self.server.delete(name)), names)

    def _names(self, prefix: str) -> list[str]:
        """All names below a prefix."""
        return [name for name, *_ in self._again(lambda: list(self.server.list(prefix)))]

    def _upload(self, prefix: str, files: Mapping[Path, str]) -> None:
        """Upload files by their content, with several threads."""
        by_content = {sha: path for path, sha in files.items()}  # equal files of a folder once

        def put(content: tuple[str, Path]) -> None:
            self._again(lambda: self.server.upload(f"{prefix}{content[0]}", content[1]))

        _each(put, by_content.items())

    def _download(self, files: Mapping[str, str], part: Path, server: ObjectServer | None = None) -> None:
        """Write files into the folder `part`. The last part of their names in the bucket is the SHA-256 of their content.

        Raises Damaged or FileNotFoundError.
        """
        source = server or self.server

        def get(item: tuple[str, str]) -> None:
            path, name = part / item[0], item[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            folder, _, sha = name.rpartition("/")
            for _ in range(TRIES):
                self._again(lambda: source.download(name, path))
                if hash_file(path) == sha:
                    return
            rule = f"{item[0]} arrived {TRIES} times with other content"
            raise Damaged("artifact", folder, rule, "check this node; run `rlhf store verify` on another")

        _each(get, files.items())

    def _again(self, request: Callable[[], T]) -> T:
        """Repeat a request for as long as a stage can wait for the bucket."""
        return repeat(request, PATIENCE_S)


# ---------------------------------------------------------------- private


def _each(do: Callable[[Item], T], items: Iterable[Item]) -> list[T]:
    """The results of `do` for all items, which several threads compute."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(do, items))


def _place(name: str) -> str:
    """The name in the bucket of a table. The tables of objects lie next to all others."""
    return name if name.startswith("objects/") else f"tables/{name}"


def _existing(table: StoredTable | None) -> StoredTable | None:
    """The table, unless it was removed."""
    return None if table is None or table.value == _REMOVED else table


def _data_files(digest: str, state: Mapping[str, Any]) -> dict[str, str]:
    """The names in the bucket of the files of an object by their paths."""
    return {path: f"data/{digest}-{state['live']}/{sha}" for path, (_, sha) in state["files"].items()}


def _work_name(key: str, entry: UploadedFile) -> str:
    """The name in the bucket of a file of unfinished work."""
    return f"work/{key}/{entry[2]}/{entry[1]}"


def _work_names(key: str, work: Mapping[str, Any]) -> set[str]:
    """The names in the bucket of all files of unfinished work."""
    return {_work_name(key, entry) for kind in ("files", "apart") for entry in work.get(kind, {}).values()}


def _size(state: Mapping[str, Any]) -> int:
    """Bytes of the files that the table of an object lists."""
    return sum(size for size, _ in state.get("files", {}).values())


def _generations(state: Mapping[str, Any]) -> list[str]:
    """The generations that the table of an object names; files of any other may be deleted."""
    return [one for one in (state["live"], *state["pending"], *state.get("aside", ())) if one]
