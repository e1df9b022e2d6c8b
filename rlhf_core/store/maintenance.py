"""Maintain a store: verify objects against their manifests, pin objects, and remove what is unreachable."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import ArtifactError, explain
from rlhf_core.store.attempts import checkpoints
from rlhf_core.store.damage import last_good, quarantine_object, suspicion
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.index import Unreadable
from rlhf_core.store.layout import MANIFEST, StoreLayout, folder_bytes, move_aside, read_json, remove_tree, write_json
from rlhf_core.store.leases import living_owner
from rlhf_core.store.object_check import object_damage
from rlhf_core.store.records import KeyRecord

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3600.0
"""Minimum age of an object to be removed: a younger one may belong to a commit whose record is not written yet."""

KEEP_DAYS_WHILE_RUNNING = 7.0
"""Minimum `keep_days` while a stage runs, because recently used records may be its inputs."""


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that does not match its manifest, a record whose object does not exist, or (without a digest) a record
    that cannot be read; all of them are now in quarantine."""

    digest: str
    problem: str
    labels: tuple[str, ...]
    suspects: tuple[str, ...] = ()
    """Labels of the results that were computed from the object after its last good check."""

    def __str__(self) -> str:
        whose = f" ({', '.join(self.labels)})" if self.labels else ""
        made = f"; made from it since it was last known to be good: {', '.join(self.suspects)}" if self.suspects else ""
        return f"object {self.digest[:12]}{whose}: {self.problem}{made}" if self.digest else f"record: {self.problem}"


@dataclass(frozen=True, slots=True)
class GcItem:
    """An unreachable item: `kind` is `object`, `record`, `attempt` or `quarantine`."""

    kind: str
    path: Path
    bytes: int
    label: str

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.bytes / 2**20:8.1f} MiB  {self.path}" + (f"  ({self.label})" * bool(self.label))


@dataclass(frozen=True, slots=True)
class GcReport:
    """What `gc` removed, or would remove in a dry run. If `held_back` lists unreadable files, records and objects were
    left alone because of them."""

    items: tuple[GcItem, ...]
    dry_run: bool
    held_back: tuple[Unreadable, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


# ---------------------------------------------------------------- verify


def verify(layout: StoreLayout, records: Sequence[KeyRecord], unreadable: Sequence[Unreadable]) -> list[Damage]:
    """Hash all objects; move damaged ones, the records that lead to them and unreadable records into quarantine.

    Records of results computed from a damaged object are moved there too, unless they precede its last good check.
    """
    users: dict[str, list[KeyRecord]] = {}
    readers: dict[str, list[KeyRecord]] = {}
    for record in records:
        users.setdefault(_object_of(record.handle.uri), []).append(record)
        for digest in {_object_of(uri) for uri in record.inputs}:
            readers.setdefault(digest, []).append(record)
    digests = {path.name for path in layout.objects.glob("*/*")} | set(users)
    damages = []
    for found in unreadable:
        logger.warning("store: %s; moved to quarantine", found)
        set_aside_record(layout, found.path.stem, f"its record {found.problem}")
        damages.append(Damage("", str(found), ()))
    for digest in sorted(digests):
        problem = _hashed(layout.object(digest))
        if not problem:
            continue
        affected = users.get(digest, [])
        for record in affected:
            set_aside_record(layout, record.key, problem)
        quarantine_object(layout, digest, problem)
        labels = tuple(sorted({record.label for record in affected}))
        logger.warning("store: object %s (%s): %s; moved to quarantine", digest[:12], ", ".join(labels), problem)
        suspects = {reader.label for reader in readers.get(digest, []) if set_aside_suspect(layout, reader)}
        damages.append(Damage(digest, problem, labels, tuple(sorted(suspects))))
    return damages


def _hashed(folder: Path) -> str:
    """Return what is wrong with an object; for a sound one, set its last good check to the time when hashing began."""
    began = time.time()
    problem = object_damage(folder, deep=True)
    if not problem and last_good(folder) < began:
        with suppress(OSError):  # this user may not write to the store: its last good check stays as it was
            os.utime(folder / MANIFEST, (began, began))
    return problem


def set_aside_suspect(layout: StoreLayout, record: KeyRecord) -> str:
    """Move the record into quarantine if its stage may have read damaged inputs; return why, or an empty string."""
    said = suspicion(layout, record.inputs, known=record.known_damage, started=record.started, seconds=record.seconds)
    if said:
        set_aside_record(layout, record.key, said)
    return said


def set_aside_record(layout: StoreLayout, key: str, problem: str) -> None:
    """Move the record of `key` into quarantine and record why, so that the next decision can report it."""
    if move_aside(layout.key(key), layout.quarantine) is not None:
        write_json(layout.damage(key), {"key": key, "problem": problem}, durable=False)


# ---------------------------------------------------------------- pins


def pin(layout: StoreLayout, target: str, note: str) -> None:
    """Protect the object or record that `target` (a digest, a key or a uri) names from `gc`."""
    name = _object_of(target)
    if not (layout.object(name).is_dir() or layout.key(name).is_file()):
        raise ArtifactError(
            explain("pin", target, "is neither an object nor a key of this store", "see `rlhf store ls`")
        )
    write_json(_pin_path(layout, name), {"target": name, "note": note})


def unpin(layout: StoreLayout, target: str) -> None:
    """Remove a pin. Raises ArtifactError if there is none."""
    path = _pin_path(layout, _object_of(target))
    if not path.exists():
        raise ArtifactError(explain("unpin", target, "is not pinned", f"the pins are {sorted(pins(layout))}"))
    path.unlink()


def pins(layout: StoreLayout) -> dict[str, str]:
    """Return the notes of all pins by target."""
    return _pins(layout)[0]


def _pins(layout: StoreLayout) -> tuple[dict[str, str], list[Unreadable]]:
    found: dict[str, str] = {}
    unreadable = []
    for path in sorted(layout.pins.glob("*.json")):
        table = read_json(path)
        if table is not None and {"target", "note"} <= table.keys():
            found[str(table["target"])] = str(table["note"])
        elif path.exists():
            unreadable.append(Unreadable(path, "is not a pin"))
    return found, unreadable


def _pin_path(layout: StoreLayout, name: str) -> Path:
    return layout.pins / f"{sha256_text(name)}.json"


# ---------------------------------------------------------------- garbage collection


def collect(
    layout: StoreLayout,
    records: Sequence[KeyRecord],
    unreadable: Sequence[Unreadable],
    *,
    dry_run: bool,
    keep_days: float,
) -> GcReport:
    """Keep what pins and recently used records reach through their inputs, and remove the rest.

    A record is removed before its object, so no record points to a missing object. Young objects and attempts of
    living owners stay; so do all records and objects while a record or a pin is unreadable.
    """
    if any(living_owner(layout.leases, path.stem) for path in layout.leases.glob("*.json")):
        keep_days = max(keep_days, KEEP_DAYS_WHILE_RUNNING)
    horizon = time.time() - keep_days * 86400
    held_back = (*unreadable, *_pins(layout)[1])
    items = [] if held_back else _unreached(layout, records, horizon)
    items.extend(_dead_attempts(layout, records, horizon))
    for path in sorted(layout.quarantine.glob("*")):
        if _modified(path) < horizon:
            items.append(GcItem("quarantine", path, folder_bytes(path), ""))
    if not dry_run:
        for item in items:
            remove_tree(item.path)
    return GcReport(tuple(items), dry_run, held_back)


def _unreached(layout: StoreLayout, records: Sequence[KeyRecord], horizon: float) -> list[GcItem]:
    live = _reached(layout, records, horizon)
    items = [
        GcItem("record", layout.key(record.key), 0, record.label)
        for record in records
        if record.key not in live.keys and _modified(layout.key(record.key)) < horizon
    ]
    labels = {_object_of(record.handle.uri): record.label for record in records}
    young = time.time() - GRACE_SECONDS
    for path in sorted(layout.objects.glob("*/*")):
        if path.name not in live.objects and _modified(path) < young:
            items.append(GcItem("object", path, folder_bytes(path), labels.get(path.name, "")))
    return items


@dataclass(frozen=True, slots=True)
class _Reached:
    keys: frozenset[str]
    objects: frozenset[str]


def _reached(layout: StoreLayout, records: Sequence[KeyRecord], horizon: float) -> _Reached:
    pinned = set(pins(layout))
    makers: dict[str, list[KeyRecord]] = {}
    for record in records:
        makers.setdefault(_object_of(record.handle.uri), []).append(record)
    objects = set(pinned)
    keys: set[str] = set()
    waiting = [
        record
        for record in records
        if record.key in pinned
        or _object_of(record.handle.uri) in pinned
        or _modified(layout.key(record.key)) >= horizon
    ]
    while waiting:
        record = waiting.pop()
        if record.key in keys:
            continue
        keys.add(record.key)
        for digest in (_object_of(record.handle.uri), *map(_object_of, record.inputs)):
            objects.add(digest)
            waiting.extend(makers.get(digest, []))
    return _Reached(frozenset(keys), frozenset(objects))


def _dead_attempts(layout: StoreLayout, records: Iterable[KeyRecord], horizon: float) -> list[GcItem]:
    labels = {record.key: record.label for record in records}
    items = []
    for folder in sorted(layout.attempts.glob("*")):
        if living_owner(layout.leases, folder.name) is not None:
            continue
        label = labels.get(folder.name, "")
        newest = max([_modified(path) for path in folder.rglob("*")], default=_modified(folder))
        if newest < horizon:
            items.append(GcItem("attempt", folder, folder_bytes(folder), label))
        elif label and checkpoints(folder).is_dir():  # its result exists: no attempt will resume from these
            items.append(GcItem("attempt", checkpoints(folder), folder_bytes(checkpoints(folder)), label))
    return items


def _object_of(uri: str) -> str:
    return uri.removeprefix("store://").partition("/")[0]


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()  # it is being removed: another process is at work there
