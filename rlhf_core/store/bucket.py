"""A store in a bucket. The bucket is the truth; this node's folder is a cache whose content is verified whenever it is read.

    tables/<name>                       a table (lease, attempts and record of a key; pins, gates, labels, ...)
    objects/<digest>                    a table: the files of an object, and the generation in which they lie
    data/<digest>-<generation>/<sha>    the files
    work/<key>/<token>/<sha>            files of the newest checkpoint of a key, by the attempt that wrote them
    clock                               written to learn the time of the server

A generation is a random name. It enters the table of its object before the first file is uploaded, and once it has left
that table it never enters again. So files of a generation that the table does not name may be deleted at any time.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlhf_core.store.fingerprint import FileEntry, hash_file, hash_tree, list_files, sha256_text, tree_digest
from rlhf_core.store.layout import (
    MANIFEST,
    fsync_path,
    fsync_tree,
    is_inside,
    make_folder,
    make_read_only,
    remove_tree,
    write_json,
)
from rlhf_core.store.object_check import object_damage
from rlhf_core.store.protocol import Conflict, Damaged, Files, Gone, StoredObject, Table, Unreachable, pack, unpack

logger = logging.getLogger(__name__)

T = TypeVar("T")
GRACE_S = 86_400.0
"""Longer than any listing is outdated, and than a node may take from the upload of an object to its record."""
TRIES = 3
"""Downloads after which other bytes than were stored count as damage that this node sees."""
PATIENCE_S, RETRY_S = 180.0, 2.0
"""How long a request is repeated while the server does not answer, and how often."""
THREADS = 16
_REMOVED = {"removed": True}
"""A table that was removed. Servers cannot delete on a condition, so an empty table takes its place."""
_NO_OBJECT: dict[str, Any] = {"live": "", "pending": [], "aside": [], "condemned": False}
"""The table of an object that is not in the store."""


class Server(Protocol):
    """The requests that a store needs. Each may raise Unreachable, also after it was carried out."""

    def get(self, name: str) -> tuple[bytes, str, float]:
        """Content, version and time of the last write. Raises FileNotFoundError."""

    def put(self, name: str, content: bytes, expected: str | None) -> str:
        """Write if the name is at version `expected` (None: if it does not exist). Raises Conflict."""

    def list(self, prefix: str) -> Iterator[tuple[str, str, float, int]]:
        """Name, version, time of the last write and size of everything below a prefix. May be outdated."""

    def upload(self, name: str, path: Path) -> None: ...

    def download(self, name: str, path: Path) -> None:
        """Raises FileNotFoundError."""

    def delete(self, name: str) -> None:
        """Unconditional; the name may not exist."""

    def touch(self, name: str) -> float:
        """Write an empty object and return the time of the server."""


class BucketStore:
    """The store behind `server`; this node keeps its cache in `cache`."""

    grace_s = GRACE_S
    folder_is_shared = False

    def __init__(self, server: Server, cache: Path, uri: str = "") -> None:
        self.server, self.folder, self.uri = server, Path(cache).absolute(), uri

    # ---------------------------------------------------------------- tables

    def read(self, name: str) -> Table | None:
        return self._read(f"tables/{name}")

    def recent(self, name: str) -> Table | None:
        return self.read(name)

    def snapshot(self) -> AbstractContextManager[None]:
        return nullcontext()

    def write(
        self, name: str, value: Mapping[str, Any], expected: str | None, *, refers: Collection[str] = ()
    ) -> Table:
        written = self._write(f"tables/{name}", value, expected)
        for digest in refers:  # after the write: a collection that did not see it has marked the object before this
            self._keep(digest)
        return written

    def remove(self, name: str, expected: str) -> None:
        self._write(f"tables/{name}", _REMOVED, expected)

    def tables(self, prefix: str) -> Iterator[Table]:
        yield from (table for table in self._tables(f"tables/{prefix}") if table.value != _REMOVED)

    def now(self) -> float:
        return self._again(lambda: self.server.touch("clock"))

    # ---------------------------------------------------------------- objects

    def add(self, digest: str, folder: Path, files: Files) -> None:
        name, mine = f"objects/{digest}", ""
        listed = {path: [entry.size, entry.sha256] for path, entry in files.items()}
        while True:
            found = self._read(name)
            version = None if found is None else found.version
            state = _NO_OBJECT if found is None else found.value
            with suppress(Conflict):
                if state["live"] and not state["condemned"]:
                    return
                if state["live"]:
                    self._write(name, state | {"condemned": False}, version)
                elif mine and mine in state["pending"]:
                    pending = [one for one in state["pending"] if one != mine]
                    self._write(
                        name, state | {"files": listed, "live": mine, "pending": pending, "condemned": False}, version
                    )
                else:
                    mine = secrets.token_hex(8)
                    self._write(name, state | {"pending": [*state["pending"], mine]}, version)
                    self._upload(f"data/{digest}-{mine}/", {folder / path: one.sha256 for path, one in files.items()})

    def fetch(self, digest: str) -> Path:
        folder = self.folder / "objects" / digest[:2] / digest
        if folder.exists():
            damage = object_damage(folder, deep=False)
            if not damage:
                return folder
            logger.warning(
                "store: the copy of object %s on this node is damaged: %s; fetching it again", digest[:12], damage
            )
            remove_tree(folder)
        make_folder(folder.parent)
        part = folder.with_name(f".{digest}.{secrets.token_hex(4)}")
        for _ in range(TRIES):
            state = self._live(digest).value
            files = {path: FileEntry(*entry) for path, entry in state["files"].items()}
            if tree_digest(files) != digest or not all(map(is_inside, files)):
                raise Damaged(
                    "artifact", digest[:12], "has a list of files that is not its own", "run `rlhf store verify`"
                )
            try:
                self._download(f"data/{digest}-{state['live']}/", part, files)
            except FileNotFoundError:  # collected, and perhaps added again, since its table was read
                remove_tree(part)
                continue
            write_json(
                part / MANIFEST,
                {"schema": 1, "files": {path: {"size": one.size, "sha256": one.sha256} for path, one in files.items()}},
            )
            return _settle(part, folder)
        raise Gone("artifact", digest[:12], f"has no files in {self.uri}", "run `rlhf store verify`")

    def has(self, digest: str) -> bool:
        found = self._read(f"objects/{digest}")
        return found is not None and bool(found.value["live"])

    def problem(self, digest: str, *, deep: bool = False) -> str:
        found = self._read(f"objects/{digest}")
        if found is None or not found.value["live"]:
            return f"is not in {self.uri}"
        if not deep:
            return ""
        part = self.folder / "verify" / f"{digest}.{secrets.token_hex(4)}"
        files = {path: FileEntry(*entry) for path, entry in found.value["files"].items()}
        try:
            self._download(f"data/{digest}-{found.value['live']}/", part, files)
        except (Damaged, FileNotFoundError) as error:
            return str(error)
        finally:
            remove_tree(part)
        return ""

    def set_aside(self, digest: str) -> None:
        found = self._read(f"objects/{digest}")
        if found is not None and found.value["live"]:
            aside = [*found.value.get("aside", ()), found.value["live"]]
            self._write(found.name, found.value | {"live": "", "aside": aside}, found.version)

    def _live(self, digest: str) -> Table:
        found = self._read(f"objects/{digest}")
        if found is None or not found.value["live"]:
            raise Gone("artifact", digest[:12], f"is not in {self.uri}", "run again to make it again")
        return found

    def _keep(self, digest: str) -> None:
        """Clear the mark of a collection, so that no later one deletes the object. Raises Gone if one has."""
        while True:
            found = self._live(digest)
            if not found.value["condemned"]:
                return
            with suppress(Conflict):
                self._write(found.name, found.value | {"condemned": False}, found.version)

    # ---------------------------------------------------------------- unfinished work

    def save_work(self, key: str, token: str, folder: Path, last: Mapping[str, Any]) -> dict[str, Any]:
        there = {entry[1]: [path, entry] for path, entry in last.get("files", {}).items()}
        files = {path: [token, hash_file(folder / path), (folder / path).stat().st_size] for path in list_files(folder)}
        files = {path: there[entry[1]][1] if entry[1] in there else entry for path, entry in files.items()}
        new = {folder / path: sha for path, (owner, sha, _) in files.items() if owner == token and sha not in there}
        self._upload(f"work/{key}/{token}/", new)
        return {"token": token, "files": files}

    def load_work(self, key: str, work: Mapping[str, Any]) -> Path:
        folder = self.folder / "work" / key / sha256_text(json.dumps(work["files"], sort_keys=True))
        files = {path: FileEntry(size, sha) for path, (_, sha, size) in work["files"].items()}
        if folder.is_dir():
            if {path: one.sha256 for path, one in hash_tree(folder).items()} == {
                path: one.sha256 for path, one in files.items()
            }:
                return folder
            remove_tree(folder)
        make_folder(folder.parent)
        part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        for owner in {owner for owner, _, _ in work["files"].values()}:
            some = {path: files[path] for path, entry in work["files"].items() if entry[0] == owner}
            try:
                self._download(f"work/{key}/{owner}/", part, some)
            except FileNotFoundError as error:
                raise Gone("checkpoint", key[:12], f"has lost a file ({error})", "use --force to start over") from None
        return _settle(part, folder)

    def drop_work(self, key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        old, new = ({(owner, sha) for owner, sha, _ in one.get("files", {}).values()} for one in (before, now))
        self._delete([f"work/{key}/{owner}/{sha}" for owner, sha in sorted(old - new)])

    # ---------------------------------------------------------------- collection

    @contextmanager
    def alone(self) -> Iterator[bool]:
        yield False

    def objects(self, but: Collection[str]) -> Iterator[StoredObject]:
        for table in self._tables("objects/"):
            digest, state = table.name.partition("/")[2], table.value
            if digest not in but and _generations(state):
                size = sum(size for size, _ in state.get("files", {}).values())
                yield StoredObject(digest, table.version, table.written, state["condemned"], size)

    def condemn(self, one: StoredObject) -> bool:
        return self._mark(one, lambda state: state | {"condemned": True}) is not None

    def delete(self, one: StoredObject) -> bool:
        before = self._mark(one, lambda state: _NO_OBJECT)
        for generation in [] if before is None else _generations(before):
            self._delete(self._names(f"data/{one.digest}-{generation}/"))
        return before is not None

    def _mark(self, one: StoredObject, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any] | None:
        found = self._read(f"objects/{one.digest}")
        if found is None or found.version != one.version:
            return None
        try:
            self._write(found.name, edit(found.value), one.version)
        except Conflict:
            return None
        return found.value

    def sweep(self, *, dry_run: bool) -> int:
        """Files are listed first and tables read afterwards: a table names a generation before its first file exists."""
        dead: list[str] = []
        data, work = self._groups("data/"), self._groups("work/")
        known = {
            f"{table.name.partition('/')[2]}-{one}"
            for table in self._tables("objects/")
            for one in _generations(table.value)
        }
        for group, names in data.items():
            dead += [] if group in known or self._is_generation(group) else names
        for group, names in work.items():
            dead += [] if self._is_work(group) else names
        if not dry_run:
            self._delete(dead)
        return len(dead)

    def _groups(self, prefix: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._names(prefix):
            found.setdefault(name.rpartition("/")[0].removeprefix(prefix), []).append(name)
        return found

    def _is_generation(self, group: str) -> bool:
        digest, _, generation = group.partition("-")
        found = self._read(f"objects/{digest}")
        return found is not None and generation in _generations(found.value)

    def _is_work(self, group: str) -> bool:
        key, _, owner = group.partition("/")
        found = self.read(f"keys/{key}")
        value = {} if found is None else found.value
        work = value.get("work") or {}
        return owner in ((value.get("lease") or {}).get("token"), *(one[0] for one in work.get("files", {}).values()))

    # ---------------------------------------------------------------- requests

    def _read(self, name: str) -> Table | None:
        found = self._get(name)
        return None if found is None or found[1].value == _REMOVED else found[1]

    def _get(self, name: str) -> tuple[bytes, Table] | None:
        """The bytes and the table of this name. Raises Damaged if they do not arrive as they were written."""
        for _ in range(TRIES):
            try:
                raw, version, written = self._again(lambda: self.server.get(name))
            except FileNotFoundError:
                return None
            value = unpack(raw)
            if value is not None:
                return raw, Table(name.removeprefix("tables/"), value, version, written)
        raise Damaged(
            "table", name, "does not arrive as it was written", "read it on another node; run `rlhf store verify` there"
        )

    def _write(self, name: str, value: Mapping[str, Any], expected: str | None) -> Table:
        raw = pack(value)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                version = self.server.put(name, raw, expected)
                return Table(name.removeprefix("tables/"), dict(value), version, 0.0)
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)
            except Conflict:
                pass
            # Our own put may have been carried out although its answer was lost.
            there = self._get(name)
            if there is not None and there[0] == raw:
                return there[1]
            if there is not None and expected is None and there[1].value == _REMOVED:
                expected = there[1].version
            elif (None if there is None else there[1].version) != expected:
                raise Conflict(name)

    def _tables(self, prefix: str) -> Iterator[Table]:
        listed = list(self._again(lambda: list(self.server.list(prefix))))
        with ThreadPoolExecutor(THREADS) as pool:
            for table in pool.map(lambda one: self._cached(*one[:3]), listed):
                if table is not None:
                    yield table

    def _cached(self, name: str, version: str, written: float) -> Table | None:
        """The table at a version that a listing names, from the cache of this node if that holds exactly these bytes."""
        path = self.folder / "cache" / f"{sha256_text(name)[:32]}.table"
        with suppress(FileNotFoundError):
            noted, _, raw = path.read_bytes().partition(b"\n")
            value = unpack(raw) if noted.decode("utf-8", "replace") == version else None
            if value is not None:
                return Table(name.removeprefix("tables/"), value, version, written)
        found = self._get(name)
        if found is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{secrets.token_hex(4)}")
        part.write_bytes(found[1].version.encode() + b"\n" + found[0])
        part.replace(path)
        return found[1]

    def _delete(self, names: Collection[str]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self._again(lambda: self.server.delete(name)), names))

    def _names(self, prefix: str) -> list[str]:
        return [name for name, *_ in self._again(lambda: list(self.server.list(prefix)))]

    def _upload(self, prefix: str, files: Mapping[Path, str]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(
                    lambda one: self._again(lambda: self.server.upload(f"{prefix}{one[1]}", one[0])), files.items()
                )
            )

    def _download(self, prefix: str, part: Path, files: Files) -> None:
        def get(item: tuple[str, FileEntry]) -> None:
            path = part / item[0]
            path.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(TRIES):
                self._again(lambda: self.server.download(f"{prefix}{item[1].sha256}", path))
                if hash_file(path) == item[1].sha256:
                    return
            rule, remedy = (
                f"{item[0]} arrived {TRIES} times with other content",
                "check this node; run `rlhf store verify` on another",
            )
            raise Damaged("artifact", prefix, rule, remedy)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(get, files.items()))

    def _again(self, request: Callable[[], T]) -> T:
        """Repeat a request that changes nothing, or that may be carried out twice, while the server does not answer."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return request()
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise
                logger.warning("%s; trying again", error)
                time.sleep(RETRY_S)


def _generations(state: Mapping[str, Any]) -> list[str]:
    """The generations that the table of an object names; files of any other may be deleted."""
    return [one for one in (state["live"], *state["pending"], *state.get("aside", ())) if one]


def _settle(part: Path, folder: Path) -> Path:
    """Let the files that have arrived in `part` be the read-only folder, on the disk before it has its name."""
    fsync_tree(part)
    try:
        part.rename(folder)
    except OSError:  # another process of this node was faster
        remove_tree(part)
        return folder
    make_read_only(folder)
    fsync_path(folder.parent)
    return folder
