"""The promises of a store that many nodes share, on simulated machines. Each promise is also shown to need its mechanism."""

import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.store import bucket, disk
from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.leases import Lease, name_of
from rlhf_core.store.protocol import Conflict, Damaged, Files, Gone, StoredObject, StoredTable, unpack, update
from tests.support.store_histories import STORES, play_all

add, cached, fetch, objects = BucketStore.add, BucketStore._cached, BucketStore.fetch, DiskStore.objects

# ---------------------------------------------------------------- mutants


def save_without_fence(lease: Lease, folder: Path, **noted: Any) -> None:
    found = lease.store.read(name_of(lease.key))
    last = (found.value if found else {}).get("work") or {}
    work = lease.store.save_work(lease.key, lease.token, folder, last) | noted
    update(lease.store, name_of(lease.key), lambda value: value | {"work": work})
    lease.store.drop_work(lease.key, last, work)


def save_after_drop(lease: Lease, folder: Path, **noted: Any) -> None:
    last = lease.check().value.get("work") or {}
    lease.store.drop_work(lease.key, last, {"files": {}})
    work = lease.store.save_work(lease.key, lease.token, folder, {}) | noted
    lease.update(lambda value: value | {"work": work})


def commit_without_fence(lease: Lease, digest: str, out: Path, files: Files, record: Any, **_: Any) -> StoredTable:
    lease.store.add(digest, out, files)
    return update(lease.store, name_of(lease.key), lambda value: value | {"record": dict(record)}, refers=[digest])


def fetch_and_remove(store: BucketStore, digest: str) -> Path:
    try:
        return fetch(store, digest)
    except (Damaged, Gone):
        found = store.read(f"objects/{digest}")
        if found is not None:
            store._write(found.name, bucket._NO_OBJECT, found.version)
        raise


@contextmanager
def at_once(store: Any) -> Iterator[bool]:
    yield True


def add_without_refresh(store: BucketStore, digest: str, folder: Path, files: Files) -> None:
    found = store.read(f"objects/{digest}")
    if found is None or not found.value["live"]:
        add(store, digest, folder, files)


def add_unnamed(store: BucketStore, digest: str, folder: Path, files: Files) -> None:
    mine = secrets.token_hex(8)
    store._upload(f"data/{digest}-{mine}/", {folder / path: one.sha256 for path, one in files.items()})
    listed = {path: [entry.size, entry.sha256] for path, entry in files.items()}
    while True:
        found = store.read(f"objects/{digest}")
        if found is not None and found.value["live"]:
            return add(store, digest, folder, files)
        with suppress(Conflict):
            state = bucket._NO_OBJECT | {"files": listed, "live": mine}
            store._write(f"objects/{digest}", state, found and found.version)
            return None


def delete_by_digest(store: BucketStore, one: StoredObject) -> bool:
    before = store._mark(one, lambda state: bucket._NO_OBJECT)
    if before is not None:
        store._delete(store._names(f"data/{one.digest}-"))
    return before is not None


def cached_at_any_version(store: BucketStore, name: str, version: str, written: float) -> StoredTable | None:
    with suppress(FileNotFoundError):
        raw = (
            (store.folder / "cache" / f"{sha256_text(bucket._place(name))[:32]}.table").read_bytes().partition(b"\n")[2]
        )
        value = (unpack(raw) if raw else {}) or bucket._NO_OBJECT
        return StoredTable(name, value, version, written)
    return cached(store, name, version, written)


def problem_by_listing(store: BucketStore, digest: str, deep: bool = False) -> str:
    found = store.recent(f"objects/{digest}")
    return "" if found is not None and found.value["live"] else "is missing"


def latest_by_listing(lease: Lease) -> StoredTable:
    with lease.store.snapshot():
        return lease.store.recent(name_of(lease.key)) or StoredTable("", {}, "", 0.0)


def old_objects(store: DiskStore, but: Collection[str]) -> Iterator[StoredObject]:
    for one in objects(store, but):
        yield replace(one, since=0.0)


def replace_without_fsync(path: Path, raw: bytes, **_: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


Mutant = list[tuple[Any, str, Any]]
EVERYWHERE: dict[str, Mutant] = {
    "a checkpoint is published without a fence": [(Lease, "save_work", save_without_fence)],
    "a record is written without a fence": [(Lease, "commit", commit_without_fence)],
    "the old checkpoint is dropped first": [(Lease, "save_work", save_after_drop)],
}
MUTANTS: dict[str, dict[str, Mutant]] = {
    "bucket": EVERYWHERE
    | {
        "a reader removes what it cannot read once": [(BucketStore, "fetch", fetch_and_remove), (bucket, "TRIES", 1)],
        "a reader removes what it cannot read three times": [(BucketStore, "fetch", fetch_and_remove)],
        "a collection needs no mark": [(BucketStore, "alone", at_once)],
        "the object is not looked at after the record": [(BucketStore, "_keep", lambda store, digest: None)],
        "an existing object is not refreshed": [
            (BucketStore, "add", add_without_refresh),
            (BucketStore, "_keep", lambda store, digest: store._live(digest)),
        ],
        "files are deleted by digest instead of generation": [(BucketStore, "delete", delete_by_digest)],
        "a generation is named after its upload": [(BucketStore, "add", add_unnamed)],
        "marks have an age by the clock of the node": [(BucketStore, "now", lambda store, exact=True: time.time())],
        "a cached table counts at any version": [(BucketStore, "_cached", cached_at_any_version)],
        "a listing decides that an object is missing": [(BucketStore, "problem", problem_by_listing)],
        "a listing is believed under a lease": [(Lease, "latest", latest_by_listing)],
        "requests are not repeated": [(BucketStore, "_again", lambda store, request: request())],
    },
    "disk": EVERYWHERE
    | {
        "a collection does not hold the lock": [(DiskStore, "alone", at_once)],
        "a record is written without a look at its object": [(DiskStore, "has", lambda store, digest: True)],
        "tables are not fsynced": [(disk, "_replace", replace_without_fsync)],
        "names of objects are not fsynced": [(disk, "fsync_path", lambda path: None)],
        "young objects are collected": [(DiskStore, "objects", old_objects)],
    },
}
QUICK = {"a record is written without a fence", "names of objects are not fsynced"}
"""Mutants of the quick run. Each is found within 60 histories."""

LONG = {"a listing decides that an object is missing"}
"""Mutants that need a thousand histories. test_shared_bucket.py finds them in one."""


FIRST = {
    "the object is not looked at after the record": 451,
    "a checkpoint is published without a fence": 465,
    "a generation is named after its upload": 225,
    "files are deleted by digest instead of generation": 529,
}
"""A seed that finds the mutant of a bucket. It is tried first, which saves up to 50 CPU seconds; all others follow."""


def mutants() -> Iterator[Any]:
    for store in STORES:
        for name in MUTANTS[store]:
            marks = [pytest.mark.full] if name in LONG else [] if name in QUICK else [pytest.mark.slow]
            yield pytest.param(store, name, marks=marks)


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 10_000), marks=pytest.mark.full)])
def test_no_history_breaks_a_promise(store, seeds):
    campaign = play_all(store, seeds)
    assert campaign.broken == {}
    faults = {"unreachable"} if store == "bucket" else {"EIO", "ENOSPC"}
    assert campaign.struck.keys() >= {"stop", "slow", "kill", "power", *faults}


@pytest.mark.parametrize(("store", "name"), mutants())
def test_a_store_without_one_of_its_mechanisms_breaks_a_promise(store, name, monkeypatch):
    for owner, attribute, value in MUTANTS[store][name]:
        monkeypatch.setattr(owner, attribute, value)
    first = FIRST.get(name, 0) if store == "bucket" else 0
    assert play_all(store, [*range(first, 1500), *range(first)], until_broken=True).broken


def test_a_history_follows_from_its_seed():
    first, second = (play_all("bucket", range(5)) for _ in range(2))
    assert (first.operations, first.struck) == (second.operations, second.struck)
