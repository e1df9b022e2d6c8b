"""Remove what nobody uses: results that were not used for long, then the objects that no record and no root reaches.

On a disk the lock of the store is held, and an object goes at once. In a bucket there is no lock, so it takes two
collections: the first marks the object, a later one deletes it if the mark is older than `Store.grace_s` by the clock of
the server and nothing has referred to the object since. Each reference clears the mark, and the deletion is a
compare-and-set on the marked version.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from rlhf_core.store.key_lease import name_of
from rlhf_core.store.protocol import Conflict, Gone, Store, Table, update

DAY_S = 86_400.0


@dataclass
class Collected:
    """Keys and digests that a collection removed, marked, or would remove in a dry run."""

    records: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    condemned: list[str] = field(default_factory=list)
    bytes: int = 0
    swept: int = 0


def used(store: Store, key: str) -> bool:
    """Note that the result of `key` is in use, at most once a day; False if it is gone."""
    found = store.read(name_of(key))
    if found is None or not found.value.get("record"):
        return False
    if store.now() - found.written < DAY_S:
        return True
    try:
        update(store, found.name, lambda value: value, refers=[found.value["record"]["object"]])
    except Gone:
        return False
    return True


def collect(
    store: Store, *, keep_s: float, dry_run: bool = False, roots: Callable[[], Collection[str]] = lambda: ()
) -> Collected:
    """Keep the keys and objects that `roots` names, results used within `keep_s`, and all that these were made from."""
    done = Collected()
    with store.alone() as at_once:
        now = store.now()
        tables = {table.name.rpartition("/")[2]: table for table in store.tables("keys/")}
        live = _reached(tables, set(roots()), now - keep_s)
        for key, table in tables.items():
            lease, record = table.value.get("lease"), table.value.get("record")
            if lease and table.written < now - store.grace_s and not dry_run:  # no heartbeat for so long
                _release(store, table)
            elif key not in live and not lease and table.written < now - keep_s and (dry_run or _removed(store, table)):
                done.records += [key] if record else []
        for one in store.objects(but=live):
            if one.since > now - store.grace_s:
                continue
            if at_once or one.condemned:
                if dry_run or store.delete(one):
                    done.deleted.append(one.digest)
                    done.bytes += one.bytes
            elif dry_run or store.condemn(one):
                done.condemned.append(one.digest)
    done.swept = store.sweep(dry_run=dry_run)
    return done


def _release(store: Store, table: Table) -> None:
    """Remove the lease of a process that is silent; its next heartbeat or commit fails if it is still there."""
    with suppress(Conflict):
        store.write(table.name, {name: one for name, one in table.value.items() if name != "lease"}, table.version)


def _removed(store: Store, table: Table) -> bool:
    try:
        store.remove(table.name, table.version)
    except Conflict:  # used, or computed again, since it was listed
        return False
    return True


def _reached(tables: dict[str, Table], roots: set[str], horizon: float) -> set[str]:
    """Keys and digests that roots, recently written tables and running stages lead to, through the inputs of records."""
    makers: dict[str, list[str]] = {}
    for key, table in tables.items():
        if table.value.get("record"):
            makers.setdefault(table.value["record"]["object"], []).append(key)
    live: set[str] = set()
    waiting = [key for key, one in tables.items() if one.written >= horizon or one.value.get("lease")] + list(roots)
    while waiting:
        name = waiting.pop()
        if name in live:
            continue
        live.add(name)
        waiting += makers.get(name, [])
        if name in tables:
            waiting += _refers(tables[name])
    return live


def _refers(table: Table) -> Iterable[str]:
    aside = table.value.get("aside") or {}
    for record in filter(None, (table.value.get("record"), aside.get("record"))):
        yield from (record["object"], *record["inputs"])
    for attempt in table.value.get("attempts", []):
        yield from attempt.get("inputs", ())


@dataclass(frozen=True, slots=True)
class Damage:
    """A key whose object this node could not read, twice, and that was set aside on request."""

    key: str
    digest: str
    problem: str
    aside: bool


def verify(store: Store, *, set_aside: bool = False) -> list[Damage]:
    """Read every byte of all results from the store. Only with `set_aside` is anything changed.

    A record that is set aside stays in the table of its key, so it can be restored; its object stays for `keep_s`.
    """
    damages = []
    for table in store.tables("keys/"):
        record = table.value.get("record")
        problem = store.problem(record["object"], deep=True) if record else ""
        if not problem:
            continue
        is_aside = False
        if set_aside:
            with suppress(Conflict):  # computed again meanwhile
                value = {name: one for name, one in table.value.items() if name != "record"}
                store.write(table.name, value | {"aside": {"record": record, "problem": problem}}, table.version)
                store.set_aside(record["object"])
                is_aside = True
        damages.append(Damage(table.name.rpartition("/")[2], record["object"], problem, is_aside))
    return damages
