"""A cache that lists all results quickly: derived from key records, which remain the source of truth.

Each entry holds the version of its table, so an entry of the same version is valid; all others are read again. If the index
file is missing, damaged or of another version, everything is read again silently. It is written atomically; of two processes
that write at the same time the last wins, and its entries are as good.

`rlhf_core.stage.code` keeps the analyses of source files in the same way, by their content and in the user's cache folder, and
`rlhf_core.store.artifacts` the digests of the files of a user's folder.

This module imports nothing slow, because `rlhf runs` and `rlhf store ls` depend on it.
"""

import json
import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import (
    StoreLayout,
    object_of,
    write_text,
)
from rlhf_core.store.protocol import DamagedTable, Store, StoredTable

logger = logging.getLogger(__name__)

RECORDS = "records.json"


@dataclass(frozen=True, slots=True)
class Row:
    """Listed fields of a key record. `digest` is the artifact's, `object` the digest of the object that holds it."""

    key: str
    label: str
    kind: str
    digest: str
    object: str
    started: str
    seconds: float
    attempts: int
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class SetAside:
    """A record that `rlhf store verify` has set aside, with the reason."""

    key: str
    label: str
    problem: str

    def __str__(self) -> str:
        return f"{self.label} {self.key}: {self.problem}"


def rows(store: Store, layout: StoreLayout) -> tuple[list[Row], list[str], list[SetAside]]:
    """The rows of all key records, oldest first; which records cannot be read, and records that were set aside."""
    known = load_entries(layout.index / RECORDS)
    unreadable: list[str] = []
    aside: list[SetAside] = []
    versions = store.versions("keys/")
    entries = {name: known[name] for name, version in versions.items() if name in known and known[name][0] == version}
    damaged: list[DamagedTable] = []
    for table in _new_tables(store, versions.keys() - entries.keys(), damaged):
        if (fields := _fields(table, unreadable, aside)) is not None:
            entries[table.name] = [versions[table.name], fields]
    unreadable += map(str, damaged)
    if entries != known and layout.root.is_dir():  # reading a store does not create one
        save_entries(layout.index / RECORDS, entries)
    found = [Row(name.rpartition("/")[2], *entry[1]) for name, entry in entries.items()]
    return sorted(found, key=lambda row: (row.started, row.key)), sorted(unreadable), aside


@dataclass(frozen=True, slots=True)
class State:
    """The state of an object: its size in bytes, or None if it does not exist here, and a description of its damage."""

    bytes: int | None
    damage: str


def states(store: Store, digests: set[str]) -> dict[str, State]:
    """Size and damage of the objects."""
    sizes = {one.digest: one.bytes for one in store.objects(but=())}
    return {digest: State(sizes.get(digest), store.problem(digest)) for digest in digests}


# ---------------------------------------------------------------- records


def _new_tables(store: Store, names: Collection[str], damaged: list[DamagedTable]) -> Iterator[StoredTable]:
    """The tables that the index does not know. In a bucket one listing costs less than a request for each name."""
    if names and not store.folder_is_shared:
        yield from (table for table in store.tables("keys/", damaged=damaged) if table.name in names)
        return
    for name in names:
        try:
            found = store.read(name)
        except DamagedTable as error:
            damaged.append(error)
            continue
        if found is not None:
            yield found


def _fields(table: StoredTable, unreadable: list[str], aside: list[SetAside]) -> list[Any] | None:
    """The fields of a row after its key; None for a key without a readable record, which is not remembered."""
    from rlhf_core.store.records import parse_record  # imports pydantic, which is not needed while the index is current

    record, problem = parse_record(table)
    if record is None:
        if entry := table.value.get("aside"):
            label = str(entry["record"]["facts"].get("label", ""))
            aside.append(SetAside(table.name.rpartition("/")[2], label, str(entry["problem"])))
        if problem:
            unreadable.append(f"{table.name} {problem}")
        return None
    handle = record.handle
    kind = type(handle).__name__.removesuffix("Ref")
    place, metrics = object_of(handle.uri), dict(record.metrics)
    return [record.label, kind, handle.digest, place, record.started, record.seconds, record.attempts, metrics]


# ---------------------------------------------------------------- the files of the index


def load_entries(file: Path) -> dict[str, list[Any]]:
    """Entries of an index file; {} if it is missing, damaged or of another version."""
    with suppress(OSError, ValueError):
        heading, _, content = file.read_text(encoding="utf-8").partition("\n")
        if heading == _heading(content):
            entries: dict[str, list[Any]] = json.loads(content)
            return entries
    return {}


def save_entries(file: Path, entries: Mapping[str, list[Any]]) -> None:
    """Replace an index file. Without write permission it is skipped."""
    content = json.dumps(entries)
    try:
        write_text(file, f"{_heading(content)}\n{content}", durable=False)
    except OSError as error:  # the disk is full, or this user may not write there
        logger.debug("could not write the index %s: %s", file, error)


def _heading(content: str) -> str:
    """First line of an index file: the code that wrote it, and the digest of the rest."""
    return f"{_maker()} {sha256_text(content)}"


@lru_cache(maxsize=1)
def _maker() -> str:
    """Digest of the code that derives the entries, and of the version of Python."""
    package = Path(__file__).parents[1]
    names = ("store/index.py", "stage/code.py", "user_code/syntax.py", "user_code/sources.py")
    return sha256_text(sys.version + "".join((package / name).read_text(encoding="utf-8") for name in names))[:16]
