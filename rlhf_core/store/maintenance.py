"""Maintain a store: verify objects against their manifests, and remove unreachable ones.

The roots of a store, which `gc` keeps with all that they were made from: pins, and what waiting runs need.

A run that waits for people may wait for longer than unused results are kept. So an open question, a stage that has halted
(people are to judge, or the time or the money was spent), and the finished stages of a run that waits are roots.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.errors import ArtifactError
from rlhf_core.store import attempts
from rlhf_core.store.attempts import checkpoints, is_resumable
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.gate_decisions import ASKERS, QUESTION, Asker, GateDecisions, Question
from rlhf_core.store.index import Unreadable
from rlhf_core.store.layout import (
    MANIFEST,
    StoreLayout,
    folder_bytes,
    fsync_path,
    move_aside,
    object_of,
    remove_record,
    remove_tree,
    walk,
    write_json,
)
from rlhf_core.store.leases import living_owner, records_of
from rlhf_core.store.object_check import last_good, object_damage, quarantine_object, set_aside_record
from rlhf_core.store.places.local import alone, disk_time
from rlhf_core.store.records import KeyRecord, parse_record
from rlhf_core.store.typed_json import Stored, read_stored

# ---------------------------------------------------------------- roots


@dataclass(frozen=True, slots=True)
class Root:
    """The kept keys, objects and artifacts, with the reason."""

    target: str
    why: str


class _Pin(Stored):
    target: str
    note: str


class _Wait(Stored):
    run: str
    keys: list[str]


def roots_of(layout: StoreLayout) -> tuple[list[Root], list[Unreadable]]:
    """Return all roots, and the files of roots that cannot be read."""
    found, unreadable = _pins(layout)
    roots = [Root(pin.target, f"pinned ({pin.note})" if pin.note else "pinned") for pin in found]
    for path in sorted(layout.waits.glob("*.json")):
        wait = read_stored(path, _Wait)
        if wait is not None:
            roots += [Root(key, f"the run {wait.run} waits") for key in wait.keys]
        elif path.exists():
            unreadable.append(Unreadable(path, "does not name what a waiting run needs"))
    for name, kind in ((QUESTION, Question), (ASKERS, Asker)):
        damaged = (path for path in sorted(layout.gates.glob(f"*/{name}")) if read_stored(path, kind) is None)
        unreadable += [
            Unreadable(path, "is damaged until its run writes it again") for path in damaged if path.exists()
        ]
    try:
        roots += _asked_about(layout)
    except ArtifactError as error:
        unreadable.append(Unreadable(layout.gates, f"has an answer that cannot be read ({error})"))
    for folder in sorted(layout.attempts.glob("*")):
        past = attempts.history(folder)
        if past and past[-1].halted:
            why = "a stage that has halted needs it"
            roots += [Root(name, why) for name in (folder.name, *map(object_of, past[-1].inputs))]
    return roots, unreadable


def _asked_about(layout: StoreLayout) -> Iterator[Root]:
    for request in GateDecisions(layout).requests():
        if request.answer is None:
            runs = ", ".join(dict.fromkeys(asker.run for asker in request.askers))
            yield Root(request.question.digest, f"gate {request.question.gate} of {runs} waits for an answer")


# ---------------------------------------------------------------- runs that wait


def note_wait(layout: StoreLayout, run: str, keys: Iterable[str]) -> None:
    """Keep the results of these keys until the run of this name has completed (`forget_wait`)."""
    write_json(_wait_path(layout, run), {"run": run, "keys": list(keys)})


def forget_wait(layout: StoreLayout, run: str) -> None:
    """Release the objects that the run of this name kept while it waited."""
    remove_record(_wait_path(layout, run))


def _wait_path(layout: StoreLayout, run: str) -> Path:
    return layout.waits / f"{sha256_text(run)}.json"


# ---------------------------------------------------------------- pins

_WHOLE = re.compile("[0-9a-f]{64}")
"""A digest or a key; the beginning of one would be a folder of objects."""


def pin(layout: StoreLayout, target: str, note: str) -> None:
    """Protect the object or record that `target` (a digest, a key or a uri) names from `gc`."""
    name = object_of(target)
    with alone(layout.leases):  # `gc` removes nothing meanwhile
        if not _WHOLE.fullmatch(name) or not (layout.holds(name) or layout.key(name).is_file()):
            rule, remedy = "is neither an object nor a key of this store", "see the digests of `rlhf store ls --json`"
            raise ArtifactError("pin", target, rule, remedy)
        write_pin(layout, name, note)


def write_pin(layout: StoreLayout, name: str, note: str) -> None:
    """Write the pin of a digest or a key; the caller holds the lock of the store."""
    write_json(_pin_path(layout, name), {"target": name, "note": note})


def unpin(layout: StoreLayout, target: str) -> None:
    """Remove a pin. Raises ArtifactError if there is none."""
    path = _pin_path(layout, object_of(target))
    if not path.exists():
        remedy = f"the pins are {', '.join(sorted(pins(layout))) or 'none'}"
        raise ArtifactError("unpin", target, "is not pinned", remedy)
    remove_record(path)
    with suppress(OSError):  # a pin that a power cut brings back keeps too much
        fsync_path(path.parent)


def pins(layout: StoreLayout) -> dict[str, str]:
    return {pin.target: pin.note for pin in _pins(layout)[0]}


def _pins(layout: StoreLayout) -> tuple[list[_Pin], list[Unreadable]]:
    found, unreadable = [], []
    for path in sorted(layout.pins.glob("*.json")):
        read = read_stored(path, _Pin)
        if read is not None:
            found.append(read)
        elif path.exists():
            unreadable.append(Unreadable(path, "is not a pin"))
    return found, unreadable


def _pin_path(layout: StoreLayout, name: str) -> Path:
    return layout.pins / f"{sha256_text(name)}.json"


# ---------------------------------------------------------------- maintenance

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3600.0
"""Minimum age of an object to be removed: a younger one may belong to a commit whose record is not written yet."""

KEEP_DAYS = 30.0
"""Days for which results are kept that nothing has used, where neither a command nor a project says otherwise."""
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
    reason: str
    """Why it is removed."""

    def __str__(self) -> str:
        label = f"  ({self.label})" * bool(self.label)
        return f"{self.kind:<10} {self.bytes / 2**20:8.1f} MiB  {self.path}{label}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GcReport:
    """Items that `gc` removed, or would remove in a dry run. If `held_back` lists unreadable files, records and objects were
    left alone because of them."""

    items: tuple[GcItem, ...]
    dry_run: bool
    held_back: tuple[Unreadable, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    """Label and key of each result that a root keeps though it was not used for long, and why."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


# ---------------------------------------------------------------- verify


def verify(layout: StoreLayout, records: Sequence[KeyRecord], unreadable: Sequence[Unreadable]) -> list[Damage]:
    """Hash all objects; move damaged ones, the records that lead to them and unreadable records into quarantine.

    So are the results that were made from a damaged object, unless they precede its last good check.
    """
    users: dict[str, list[KeyRecord]] = {}
    for record in records:
        users.setdefault(object_of(record.handle.uri), []).append(record)
    digests = {path.name for path in layout.objects.glob("*/*")} | set(users)
    damages = []
    for found in unreadable:
        with alone(layout.leases):  # another process may have replaced it since
            if parse_record(found.path)[1]:
                logger.warning("store: %s; moved to quarantine", found)
                set_aside_record(layout, found.path.stem, f"its record {found.problem}")
                damages.append(Damage("", str(found), ()))
    for digest in sorted(digests):
        if not _hashed(layout.object(digest)):
            continue
        with alone(layout.leases):
            problem = _hashed(layout.object(digest))
            affected = [record for record in users.get(digest, []) if layout.key(record.key).exists()]
            if not problem or not (affected or layout.object(digest).exists()):
                continue
            for record in affected:
                set_aside_record(layout, record.key, problem)
            suspects = set(quarantine_object(layout, digest, problem))
        labels = tuple(sorted({record.label for record in affected}))
        logger.warning("store: object %s (%s): %s; moved to quarantine", digest[:12], ", ".join(labels), problem)
        damages.append(Damage(digest, problem, labels, tuple(sorted(suspects))))
    return damages


def _hashed(folder: Path) -> str:
    """Return the damage of an object; for a sound one, set its last good check to the time when hashing began."""
    began = time.time()
    problem = object_damage(folder, deep=True)
    if not problem and last_good(folder) < began:
        with suppress(OSError):  # this user may not write to the store: its last good check stays as it was
            os.utime(folder / MANIFEST, (began, began))
    return problem


# ---------------------------------------------------------------- garbage collection


def collect(
    layout: StoreLayout,
    scan: Callable[[], tuple[list[KeyRecord], list[Unreadable]]],
    *,
    dry_run: bool,
    keep_days: float,
    project: str = "",
) -> GcReport:
    """Keep the objects that roots and recently used records reach through their inputs; remove the rest.

    A record is removed before its object, so no record points to a missing object. Young objects and attempts of
    living owners stay; so do all records and objects while a record or a root is unreadable. The lock of the store is
    held until all is decided and out of the way: nothing that another process begins to use meanwhile is removed. With a
    `project`, records of others are roots; attempts and quarantine, which have no project, stay.
    """
    check_days(keep_days)
    with alone(layout.leases) if layout.root.is_dir() and not dry_run else nullcontext():
        now = time.time() if dry_run or not layout.root.is_dir() else disk_time(layout.leases)
        records, unreadable = scan()
        roots, unreadable_roots = roots_of(layout)
        if project:
            roots += [Root(one.key, "is of another project") for one in records if one.project != project]
        held_back = (*unreadable, *unreadable_roots)
        if any(living_owner(layout.leases, Path(name).stem) for name in records_of(layout.leases).names()):
            keep_days = max(keep_days, KEEP_DAYS_WHILE_RUNNING)
        horizon, young = now - keep_days * 86400, now - GRACE_SECONDS
        items = [] if held_back else _unreached(layout, records, roots, horizon, young)
        items.extend([] if project else _dead_attempts(layout, records, roots, horizon))
        aside = [] if dry_run else _out_of_the_way(layout, items)
    for path in sorted(layout.quarantine.glob("*")):
        if not project and path not in aside and _modified(path) < horizon:
            items.append(GcItem("quarantine", path, folder_bytes(path), "", f"there for {_days(path)}"))
            aside.append(path)
    if not dry_run:
        for path in aside:
            try:
                remove_tree(path)
            except ArtifactError as error:
                logger.warning("store: %s", error)
    kept = () if held_back else tuple(_kept(layout, records, roots, horizon))
    return GcReport(tuple(items), dry_run, held_back, kept)


def check_days(keep_days: float) -> None:
    """Raise ArtifactError if results cannot be kept for so many days; NaN is less than nothing."""
    if not keep_days >= 0:
        raise ArtifactError("keep_days", keep_days, "must be 0 or more", "to keep everything, do not run gc")


def _out_of_the_way(layout: StoreLayout, items: Sequence[GcItem]) -> list[Path]:
    """Remove the records; take the rest from their places, each in one step, and return where they are now."""
    records = [item.path for item in items if item.kind == "record"]
    for path in records:
        remove_record(path)
    for folder in {path.parent for path in records}:
        fsync_path(folder)  # or a power cut could bring back a record whose object is gone
    moved = (move_aside(item.path, layout.quarantine) for item in items if item.kind != "record")
    return [path for path in moved if path is not None]


def _unreached(
    layout: StoreLayout, records: Sequence[KeyRecord], roots: Sequence[Root], horizon: float, young: float
) -> list[GcItem]:
    live = _reached(layout, records, roots, horizon)
    items = [
        GcItem(
            "record", path, 0, record.label, f"not used for {_days(path)}, and nothing that is kept was made from it"
        )
        for record in records
        for path in [layout.key(record.key)]
        if record.key not in live and _modified(path) < horizon
    ]
    labels = {object_of(record.handle.uri): record.label for record in records}
    for path in sorted(layout.objects.glob("*/*")):
        if path.name not in live and _modified(path) < young:
            label = labels.get(path.name, "")
            reason = "its records are removed" if label else "no record leads to it"
            items.append(GcItem("object", path, folder_bytes(path), label, reason))
    return items


def _reached(layout: StoreLayout, records: Sequence[KeyRecord], roots: Sequence[Root], horizon: float) -> set[str]:
    """Return the keys and the digests of the objects that roots and recently used records lead to."""
    named = {root.target for root in roots}
    makers: dict[str, list[KeyRecord]] = {}
    for record in records:
        makers.setdefault(object_of(record.handle.uri), []).append(record)
    live = set(named)
    followed: set[str] = set()
    waiting = [record for record in records if named & _names(record) or _modified(layout.key(record.key)) >= horizon]
    while waiting:
        record = waiting.pop()
        if record.key in followed:
            continue
        followed.add(record.key)
        for digest in (object_of(record.handle.uri), *map(object_of, record.inputs)):
            live.add(digest)
            waiting.extend(makers.get(digest, []))
    return live | followed


def _names(record: KeyRecord) -> set[str]:
    """Return the names of a record in roots: its key, its object, and the digest of its artifact."""
    return {record.key, object_of(record.handle.uri), record.handle.digest}


def _kept(
    layout: StoreLayout, records: Sequence[KeyRecord], roots: Sequence[Root], horizon: float
) -> Iterator[tuple[str, str]]:
    """Yield label and reason of each record that has not been used for long and that a root keeps."""
    for record in records:
        whys = [root.why for root in roots if root.target in _names(record)]
        if whys and _modified(layout.key(record.key)) < horizon:
            yield f"{record.label} {record.key[:12]}", "; ".join(dict.fromkeys(whys))


def _dead_attempts(
    layout: StoreLayout, records: Iterable[KeyRecord], roots: Sequence[Root], horizon: float
) -> list[GcItem]:
    finished = {record.key: record for record in records}
    named = {root.target for root in roots}
    items = []
    for folder in sorted(layout.attempts.glob("*")):
        if living_owner(layout.leases, folder.name) is not None:
            continue
        record = finished.get(folder.name)
        label = "" if record is None else record.label
        newest = max(map(_modified, (folder, *walk(folder))))
        if newest < horizon and (label or folder.name not in named):
            reason = f"not gone on with for {_days(folder)}"
            items.append(GcItem("attempt", folder, folder_bytes(folder), label, reason))
        elif record is not None and checkpoints(folder).is_dir() and not is_resumable(folder, record.attempts):
            path, reason = checkpoints(folder), "its result exists: no attempt will resume from these"
            items.append(GcItem("attempt", path, folder_bytes(path), label, reason))
    return items


def _days(path: Path) -> str:
    return f"{(time.time() - _modified(path)) / 86400:.0f} days"


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()  # it is being removed: another process is at work there
