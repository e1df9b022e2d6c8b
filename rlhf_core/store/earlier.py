"""Stores with schema 1, in which records, histories, gates and pins were separate files. They are read in place.

A table replaces such a file when it is first written. Objects on a disk have the same place in both schemas. In a bucket, the
files of an object are copied to the new place when a write refers to the object.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.fingerprint import FileEntry
from rlhf_core.store.layout import mark_schema, move_aside, object_of, read_json, remove_tree
from rlhf_core.store.object_server import ObjectServer
from rlhf_core.store.protocol import DamagedTable, Gone, StoredTable

File = tuple[dict[str, Any], float]
"""Content and time of the last write of a file with schema 1."""
_EARLIER = "schema 1, "
"""Beginning of the version of a table that is still a file with schema 1."""
_PATTERNS = {
    "keys": ("keys/*/*.json", "attempts/*/attempt.json"),
    "gates": ("roots/gates/*/question.json",),
}
"""Files with schema 1 by the kind of their tables. All others are `roots/<kind>/<name>.json`."""


class EarlierDiskStore(DiskStore):
    """A store on a disk that may contain files with schema 1."""

    def read(self, name: str) -> StoredTable | None:
        """A table, or else the files that it would replace."""
        found = super().read(name)
        return found if found is not None else _table(name, self._file, self._children)

    def set_table_aside(self, name: str) -> None:
        """Also the files with schema 1 of a table that cannot be read."""
        super().set_table_aside(name)
        try:
            self.read(name)
        except DamagedTable:
            for path in _paths(name):
                move_aside(self.folder / path, self.folder / "quarantine")

    def remove(self, name: str, expected: str) -> None:
        """Remove the files with schema 1, too: they would be the table otherwise."""
        with self._lock():
            super().remove(name, expected)
            for path in _paths(name):
                remove_tree(self.folder / path)

    def versions(self, prefix: str) -> dict[str, str]:
        """Also the names of tables that are still files with schema 1."""
        found = super().versions(prefix)
        earlier: dict[str, str] = {}
        kind = prefix.partition("/")[0]
        for pattern in _PATTERNS.get(kind, (f"roots/{kind}/*.json",)):
            for path in self.folder.glob(pattern):
                name = _name(path.relative_to(self.folder).as_posix())
                if name not in found:
                    earlier[name] = f"{earlier.get(name, '')} {path.stat().st_ino} {path.stat().st_mtime_ns}"
        return dict(sorted((found | earlier).items()))

    def _expect(self, name: str, expected: str | None) -> None:
        """Raise the schema of the store before each change: an older program would not see it."""
        mark_schema(self.folder)
        super()._expect(name, expected)

    def _file(self, path: str) -> File | None:
        """The content of a file with schema 1. Raises DamagedTable if it is not a table."""
        content = read_json(self.folder / path)
        if content is None and (self.folder / path).exists():
            raise DamagedTable.of(_name(path), f"is not a JSON object ({self.folder / path})")
        return None if content is None else (content, (self.folder / path).stat().st_mtime)

    def _children(self, folder: str) -> list[str]:
        """Names of the files in a folder with schema 1."""
        return [path.name for path in sorted((self.folder / folder).glob("*.json"))]


class EarlierBucketStore(BucketStore):
    """A store in a bucket that may contain objects with schema 1, which `earlier` reads. Nothing is changed there."""

    def __init__(self, server: ObjectServer, cache: Path, uri: str, earlier: ObjectServer) -> None:
        super().__init__(server, cache, uri)
        self.earlier = earlier
        self._times: dict[str, float] | None = None
        """Path -> time of the last write of the files with schema 1, listed once."""

    def _tables(self, prefix: str, damaged: list[DamagedTable] | None = None) -> Iterator[StoredTable]:
        """The tables, and the files with schema 1 whose tables do not exist yet."""
        found = {table.name: table for table in super()._tables(prefix, damaged)}
        earlier = map(self._earlier_table, self._earlier_names(prefix) - found.keys())
        yield from (*found.values(), *filter(None, earlier))

    def versions(self, prefix: str) -> dict[str, str]:
        """Also the names of tables that are still files with schema 1."""
        return dict.fromkeys(self._earlier_names(prefix), _EARLIER) | super().versions(prefix)

    def problem(self, digest: str, *, deep: bool = False) -> str:
        """The damage of an object, "" for an object that lies at the earlier place."""
        said = super().problem(digest, deep=deep)
        return "" if said and f"objects/{digest}.json" in self._earlier_times() else said

    def has(self, digest: str) -> bool:
        """True if the object lies at either place."""
        return super().has(digest) or f"objects/{digest}.json" in self._earlier_times()

    def fetch(self, digest: str) -> Path:
        """Copy the object to the new place if it lies at the earlier one alone."""
        try:
            return super().fetch(digest)
        except Gone:
            self._copy(digest)
            return super().fetch(digest)

    def _keep(self, digest: str) -> None:
        """Copy the object if it lies at the earlier place alone, so the new reference holds."""
        try:
            super()._keep(digest)
        except Gone:
            self._copy(digest)

    def _copy(self, digest: str) -> None:
        """Store an object with schema 1 anew. Raises Gone if it does not exist there."""
        if f"objects/{digest}.json" not in self._earlier_times():
            raise Gone.object(digest, self.uri)
        manifest = json.loads(self._again(lambda: self.earlier.get(f"objects/{digest}.json"))[0])
        files = {path: FileEntry(int(one["size"]), str(one["sha256"])) for path, one in manifest["files"].items()}
        part = self.scratch()
        self._download({path: f"blobs/{one.sha256}" for path, one in files.items()}, part, self.earlier)
        self.add(digest, part, files)
        self.settle(digest, part, files)

    def recent(self, name: str) -> StoredTable | None:
        """A table of the last listing, or else the files with schema 1."""
        found = super().recent(name)
        with self._threads:
            is_known = name in self._listed  # perhaps as a removed table, which hides the files
        return self._earlier_table(name) if found is None and not is_known else found

    def _write(self, name: str, value: Mapping[str, Any], expected: str | None) -> StoredTable:
        """An earlier table has no version at the new place: the write creates the table, or a removed one, which hides it."""
        is_earlier = expected is not None and expected.startswith(_EARLIER)
        return super()._write(name, value, None if is_earlier else expected)

    def _get(self, name: str) -> tuple[bytes, StoredTable] | None:
        """A table, or else the files with schema 1."""
        found = super()._get(name)
        table = self._earlier_table(name) if found is None else None
        return found if table is None else (b"", table)

    def _earlier_table(self, name: str) -> StoredTable | None:
        """The files with schema 1 of a table; None if the bucket never had that schema."""
        return _table(name, self._file, self._children) if self._earlier_times() else None

    def _earlier_names(self, prefix: str) -> set[str]:
        """Names of the tables that are files with schema 1."""
        paths = [path.removeprefix("records/") for path in self._earlier_times() if path.startswith("records/")]
        names = {_name(path) for path in paths if path.count("/") > 1}  # the others are marks, and times of use
        return {name for name in names if name.startswith(prefix)}

    def _children(self, folder: str) -> list[str]:
        """Names of the files in a folder with schema 1."""
        prefix = f"records/{folder}/"
        return sorted(path.removeprefix(prefix) for path in self._earlier_times() if path.startswith(prefix))

    def _earlier_times(self) -> dict[str, float]:
        """All files with schema 1. Nobody writes them any more, so one listing is enough."""
        if self._times is None:
            listed = [
                *self._again(lambda: list(self.earlier.list("records/"))),
                *self._again(lambda: list(self.earlier.list("objects/"))),
            ]
            self._times = {name: written for name, _, written, _ in listed}
        return self._times

    def _file(self, path: str) -> File | None:
        """The content of a file with schema 1, and the later of its writing and its last use."""
        times = self._earlier_times()
        if f"records/{path}" not in times:
            return None
        content = json.loads(self._again(lambda: self.earlier.get(f"records/{path}"))[0])
        used = f"records/used/{Path(path).stem}.json"
        if "_dropped" in content:
            return None
        value = {name: one for name, one in content.items() if name != "_put"}
        return value, max(times[f"records/{path}"], times.get(used, 0.0))


# ---------------------------------------------------------------- files with schema 1 as tables


def _table(name: str, read: Callable[[str], File | None], children: Callable[[str], list[str]]) -> StoredTable | None:
    """Build the table that corresponds to the files with schema 1; None without any."""
    kind, _, rest = name.partition("/")
    if kind == "keys":
        value, written = _key(rest, read)
    elif kind == "gates":
        value, written = _gate(rest, read, children)
    else:
        value, written = read(f"roots/{name}.json") or ({}, 0.0)
    if not value:
        return None
    return StoredTable(name, value, f"{_EARLIER}{hashlib.sha256(json.dumps(value).encode()).hexdigest()}", written)


def _key(key: str, read: Callable[[str], File | None]) -> File:
    """Record and history of a key, with the time of the record, which was touched at each use."""
    record, past = read(f"keys/{key[:2]}/{key}.json"), read(f"attempts/{key}/attempt.json")
    value: dict[str, Any] = {}
    if past is not None:
        value = {name: past[0][name] for name in ("label", "attempts") if name in past[0]}
    if record is not None:
        value["record"] = stored_record(record[0])
    return value, (record or past or ({}, 0.0))[1]


def stored_record(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The entry `record` of a key's table: the object and the inputs by digest, which collections follow, and the facts."""
    try:
        digest = object_of(facts["handle"]["fields"]["uri"])
        inputs = sorted({object_of(uri) for uri in facts["inputs"] if uri.startswith("store://")})
    except (KeyError, TypeError, AttributeError):  # damaged; the parser of the facts reports it
        digest, inputs = "", []
    return {"object": digest, "inputs": inputs, "facts": dict(facts)}


def _gate(question: str, read: Callable[[str], File | None], children: Callable[[str], list[str]]) -> File:
    """A question was a folder: the finding, a file for each run that waits, and a numbered file for each answer."""
    folder = f"roots/gates/{question}"
    found = {name: read(f"{folder}/{name}") for name in children(folder)}
    asked = found.get("question.json")
    if asked is None:
        return {}, 0.0
    askers = {name[6:-5]: one[0] for name, one in found.items() if name.startswith("asked-") and one is not None}
    answers = [one[0] for name, one in sorted(found.items()) if name.startswith("answer-") and one is not None]
    return {"question": asked[0], "askers": askers, "answers": answers}, asked[1]


def _name(path: str) -> str:
    """The name of the table of a file with schema 1."""
    parts = path.removesuffix(".json").split("/")
    if parts[0] == "keys":
        return f"keys/{parts[-1]}"
    if parts[0] == "attempts":
        return f"keys/{parts[1]}"
    return f"gates/{parts[2]}" if parts[1] == "gates" else "/".join(parts[1:])


def _paths(name: str) -> tuple[str, ...]:
    """The files and folders with schema 1 that a table has replaced."""
    kind, _, rest = name.partition("/")
    if kind == "keys":
        return (f"keys/{rest[:2]}/{rest}.json", f"attempts/{rest}/attempt.json")
    return (f"roots/gates/{rest}",) if kind == "gates" else (f"roots/{name}.json",)
