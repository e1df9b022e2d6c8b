"""Check the objects of a store, and remove unused results and the objects that no record and no root reaches.

On a disk the lock of the store is held, and an object is removed at once. A bucket has no lock, so it takes two collections: the
first marks the object, and a later one deletes it if the mark was older than `Store.grace_s` by the clock of the server when
that collection began, and nothing has referred to the object since. Each reference clears the mark, and the deletion is a
compare-and-set on the marked version.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError
from rlhf_core.store.attempts import AttemptFolder, checkpoints, is_resumable
from rlhf_core.store.disk import TRASH, empty_trash
from rlhf_core.store.layout import folder_bytes, move_aside, walk
from rlhf_core.store.leases import living_owner, name_of, owner_in, without
from rlhf_core.store.protocol import Conflict, DamagedTable, Gone, Store, StoredTable, update
from rlhf_core.store.roots import Root, roots_of

DAY_S = 86_400.0
KEEP_DAYS = 30.0
"""Days for which unused results are kept, unless a command or a project says otherwise."""
KEEP_DAYS_WHILE_RUNNING = 7.0
"""Minimum `keep_days` while a stage runs, because recently used records may be its inputs."""


def check_days(keep_days: float) -> None:
    """Raise ArtifactError if `keep_days` is negative or NaN."""
    if not keep_days >= 0:
        raise ArtifactError("keep_days", keep_days, "must be 0 or more", "to keep everything, do not run gc")


def note_use(store: Store, found: StoredTable | None) -> bool:
    """Note that the result in the table of a key is in use, at most once a day; False if it is gone."""
    if found is None or not found.value.get("record"):
        return False
    if store.now(exact=False) - found.written < DAY_S:
        return True
    try:
        update(store, found.name, _used, refers=[found.value["record"]["object"]])
    except Gone:
        return False
    return True


def _used(value: dict[str, Any]) -> dict[str, Any]:
    """An unchanged value: writing it resets the table's age. Raises Gone if a collection was faster."""
    if not value.get("record"):
        raise Gone("a collection has removed the record")
    return value


# ---------------------------------------------------------------- garbage collection


@dataclass(frozen=True, slots=True)
class GcItem:
    """An unused item: `kind` is `record`, `object`, `marked` (an object that a later collection removes), `attempt` or
    `quarantine`."""

    kind: str
    name: str
    bytes: int
    label: str
    reason: str

    def __str__(self) -> str:
        label = f"  ({self.label})" * bool(self.label)
        return f"{self.kind:<10} {self.bytes / 2**20:8.1f} MiB  {self.name}{label}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GcReport:
    """Items that a collection removed, or would remove in a dry run.

    If `held_back` lists unreadable tables, records and objects were left alone because of them.
    """

    items: tuple[GcItem, ...]
    dry_run: bool
    held_back: tuple[str, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()
    """Label and key of each result that a root keeps although it was not used for long, and the reason."""
    swept: int = 0
    """Number of files that no table named."""

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items if item.kind != "marked")


def collect(store: Store, *, keep_days: float = KEEP_DAYS, dry_run: bool = False, project: str = "") -> GcReport:
    """Keep the objects that roots and recently used records reach through their inputs, and remove the rest.

    A record is removed before its object, so no record points to a missing object. While a table cannot be read, records and
    objects stay. With a `project`, records of other projects are roots; attempts and quarantine stay, which have no project.
    """
    check_days(keep_days)
    if store.folder_is_shared and not store.folder.is_dir():
        return GcReport((), dry_run)
    alone = nullcontext(store.folder_is_shared) if dry_run else store.alone()
    # Before the listing: an object goes only if its mark is older than everything by which it is judged.
    now = time.time() if dry_run and store.folder_is_shared else store.now()
    with store.snapshot(within_s=0.0):
        with alone as at_once:
            damaged: list[DamagedTable] = []
            tables = {table.name.rpartition("/")[2]: table for table in store.tables("keys/", damaged=damaged)}
            roots, unreadable = roots_of(store, tables.values())
            held_back = (*map(str, damaged), *unreadable)
            if project:
                others = (key for key, table in tables.items() if _facts(table).get("project", "") != project)
                roots += [Root(key, "is of another project") for key in others if tables[key].value.get("record")]
            if any(living_owner(store, key) for key, table in tables.items() if owner_in(table.value)):
                keep_days = max(keep_days, KEEP_DAYS_WHILE_RUNNING)
            horizon = now - keep_days * DAY_S
            run = _Collection(store, tables, roots, now, horizon, dry_run)
            items = [] if held_back else [*run.records(), *run.objects(at_once=at_once)]
            items += [] if project else [*run.attempts(), *run.quarantine()]
        kept = () if held_back else tuple(run.kept())
        if not dry_run:
            empty_trash(store.folder)
        return GcReport(tuple(items), dry_run, held_back, kept, store.sweep(dry_run=dry_run))


@dataclass(frozen=True, slots=True)
class _Collection:
    """One collection: its listing, and its horizon by the clock of the store."""

    store: Store
    tables: dict[str, StoredTable]
    roots: list[Root]
    now: float
    horizon: float
    dry_run: bool

    def records(self) -> Iterator[GcItem]:
        """Remove the tables of keys that nothing reaches, and the leases of silent processes."""
        live = self.reached()
        for key, table in self.tables.items():
            lease = table.value.get("lease")
            is_young = table.written >= self.horizon
            if lease and table.written < self.now - self.store.grace_s and not self.dry_run:
                _release(self.store, table)
            if lease or is_young or key in live or not (self.dry_run or _is_removed(self.store, table)):
                continue
            if table.value.get("record"):
                reason = f"not used for {self._days(table.written)}, and nothing that is kept was made from it"
                yield GcItem("record", key, 0, _label(table), reason)

    def objects(self, *, at_once: bool) -> Iterator[GcItem]:
        """Remove, or mark for a later collection, the objects that nothing reaches."""
        labels = {object_in(table): _label(table) for table in self.tables.values()}
        for one in self.store.objects(but=self.reached()):
            if one.since > self.now - self.store.grace_s:
                continue
            label = labels.get(one.digest, "")
            reason = "its records are removed" if label else "no record leads to it"
            if at_once or one.condemned:
                if self.dry_run or self.store.delete(one):
                    yield GcItem("object", one.digest, one.bytes, label, reason)
            elif self.dry_run or self.store.condemn(one):
                hours = self.store.grace_s / 3600
                yield GcItem(
                    "marked", one.digest, one.bytes, label, f"{reason}; a gc in {hours:.0f} h or later deletes it"
                )

    def attempts(self) -> Iterator[GcItem]:
        """Remove unfinished work on this node that no attempt will resume."""
        named = {root.target for root in self.roots}
        for folder in sorted((self.store.folder / "attempts").glob("*")):
            table = self.tables.get(folder.name)
            if table is not None and owner_in(table.value) and living_owner(self.store, folder.name) is not None:
                continue
            record, label = (None, "") if table is None else (table.value.get("record"), _label(table))
            newest = max(map(_modified, (folder, *walk(folder))))
            past = AttemptFolder(self.store, folder.name, folder)
            if newest < self.horizon and (record or folder.name not in named):
                yield self._removed("attempt", folder, label, f"not resumed for {self._days(newest)}")
            elif record and checkpoints(past).is_dir() and not is_resumable(past, record["facts"]["attempts"]):
                reason = "its result exists: no attempt will resume from these"
                yield self._removed("attempt", checkpoints(past), label, reason)

    def quarantine(self) -> Iterator[GcItem]:
        """Delete the files that `verify` has set aside long ago. Their records can no longer be restored."""
        for one in self.store.delete_aside(self.horizon, dry_run=self.dry_run):
            yield GcItem("quarantine", one.digest, one.bytes, "", f"there for {self._days(one.since)}")

    def kept(self) -> Iterator[tuple[str, str]]:
        """Label and reason of each record that was not used for long and that a root keeps."""
        for key, table in self.tables.items():
            if table.value.get("record") and table.written < self.horizon:
                whys = [root.why for root in self.roots if root.target in _names(key, table)]
                if whys:
                    yield f"{_label(table)} {key[:12]}", "; ".join(dict.fromkeys(whys))

    def reached(self) -> set[str]:
        """Keys and digests that roots, recently written tables and running stages lead to, through the inputs of records."""
        makers: dict[str, list[str]] = {}
        for key, table in self.tables.items():
            if table.value.get("record"):
                makers.setdefault(object_in(table), []).append(key)
        named = {root.target for root in self.roots}
        waiting = [
            key
            for key, table in self.tables.items()
            if table.written >= self.horizon or table.value.get("lease") or named & _names(key, table)
        ]
        waiting += named
        live: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in live:
                live.add(name)
                waiting += makers.get(name, [])
                waiting += _references(self.tables[name]) if name in self.tables else ()
        return live

    def _removed(self, kind: str, path: Path, label: str, reason: str) -> GcItem:
        """Move a folder out of the way in one step; removing it may take long."""
        item = GcItem(kind, str(path), folder_bytes(path), label, reason)
        if not self.dry_run:
            move_aside(path, self.store.folder / TRASH)  # in one step: removing it may take long
        return item

    def _days(self, then: float) -> str:
        return f"{(self.now - then) / DAY_S:.0f} days"


def _release(store: Store, table: StoredTable) -> None:
    """Remove the lease of a silent process. If the process still runs, its next heartbeat or commit fails."""
    with suppress(Conflict):
        store.write(table.name, without(table.value, "lease"), table.version)


def _is_removed(store: Store, table: StoredTable) -> bool:
    """Remove the table of a key unless it was used, or computed again, since it was listed."""
    try:
        store.remove(table.name, table.version)
    except Conflict:  # used, or computed again, since it was listed
        return False
    return True


def object_in(table: StoredTable) -> str:
    """The digest of the object of a key's record, or ""."""
    record = table.value.get("record")
    return str(record["object"]) if record else ""


def _facts(table: StoredTable) -> dict[str, Any]:
    """The facts in a key's record; {} without one."""
    record = table.value.get("record")
    return record["facts"] if record else {}


def _label(table: StoredTable) -> str:
    return str(_facts(table).get("label", ""))


def _names(key: str, table: StoredTable) -> set[str]:
    """The names of a record in roots: its key, its object, and the digest of its artifact."""
    handle = _facts(table).get("handle") or {}
    return {key, object_in(table), handle.get("fields", {}).get("digest", "")} - {""}


def _references(table: StoredTable) -> Iterable[str]:
    """Digests that a table leads to: objects and inputs of its record, and of a record that was set aside."""
    aside = table.value.get("aside") or {}
    for record in filter(None, (table.value.get("record"), aside.get("record"))):
        yield from (record["object"], *record["inputs"])
    if table.value.get("lease") or not table.value.get("record"):  # unfinished work needs its inputs
        for attempt in table.value.get("attempts", [])[-1:]:
            yield from (uri.removeprefix("store://").partition("/")[0] for uri in attempt.get("inputs", ()))


def _modified(path: Path) -> float:
    """The time of the last change of a file; now, if another process is removing it."""
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()  # it is being removed: another process is at work there


# ---------------------------------------------------------------- damage


@dataclass(frozen=True, slots=True)
class Damage:
    """An object or a table that this node could not read. `aside`: whether it was set aside."""

    digest: str
    """Digest of the object; "" for a table."""
    problem: str
    labels: tuple[str, ...] = ()
    aside: bool = False

    def __str__(self) -> str:
        whose = f" ({', '.join(self.labels)})" if self.labels else ""
        return f"object {self.digest[:12]}{whose}: {self.problem}" if self.digest else f"record: {self.problem}"


def verify(store: Store, *, set_aside: bool = False) -> list[Damage]:
    """Read every byte of all objects from the store. Only with `set_aside` is anything changed.

    A record that is set aside stays in the table of its key, and its object stays in the store, so `restore` finds both.
    """
    damaged: list[DamagedTable] = []
    users: dict[str, list[StoredTable]] = {}
    for table in store.tables("keys/", damaged=damaged):
        if table.value.get("record"):
            users.setdefault(object_in(table), []).append(table)
    found = [Damage("", str(one), aside=set_aside) for one in damaged]
    for one in damaged if set_aside else ():
        store.set_table_aside(one.name)
    digests = {one.digest for one in store.objects(but=())} | set(users)
    for digest in sorted(digests - {""}):
        problem = store.problem(digest, deep=True)
        if not problem:
            continue
        labels = tuple(sorted({_label(table) for table in users.get(digest, [])}))
        if set_aside:
            for table in users.get(digest, []):
                _set_record_aside(store, table, problem)
            store.set_aside(digest)
        found.append(Damage(digest, problem, labels, set_aside))
    return found


def _set_record_aside(store: Store, table: StoredTable, problem: str) -> None:
    """Let a record no longer count. It stays in the table, with the reason."""
    aside = {"record": table.value["record"], "problem": problem}
    with suppress(Conflict):  # computed again meanwhile
        store.write(table.name, without(table.value, "record") | {"aside": aside}, table.version)


def restore(store: Store, key: str) -> None:
    """Let the record of a key count again that was set aside. Raises ArtifactError if it has none, or is damaged."""
    found = store.read(name_of(key))
    aside = None if found is None else found.value.get("aside")
    if found is None or not aside:
        raise ArtifactError("key", key, "has no record that was set aside", "see `rlhf store ls --json`")
    if found.value.get("record"):
        remedy = "remove nothing: the newer result counts"
        raise ArtifactError("key", key[:12], "has been computed again since its record was set aside", remedy)
    digest = aside["record"]["object"]
    store.restore(digest)
    problem = store.problem(digest, deep=True)
    if problem:
        store.set_aside(digest)
        raise ArtifactError("artifact", digest[:12], f"is damaged ({problem})", "run the stage again")
    value = without(found.value, "aside") | {"record": aside["record"]}
    store.write(found.name, value, found.version, refers=[digest])
