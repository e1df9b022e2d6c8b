"""Histories of nodes that share a store, and the promises that hold at every instant of each history.

    python -m tests.support.store_histories --store bucket --histories 10000

1. The record of an acknowledged result stays, and a fresh node can read its object. So it can read a pinned object.
2. A key has one result: an acknowledged record is never replaced, and only the holder of the lease writes one.
3. An acknowledged checkpoint stays until its key has a result.
4. Every process ends by itself, with its result or with one error. A fresh node completes the work afterwards.
5. A broken response ends no run, nor does a collection if the run commits within the grace period.
6. After the last collection, no file of a checkpoint is left in the bucket.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from campaigns.durability.simulated_machines import Process, World, current
from rlhf_core.errors import ArtifactError
from rlhf_core.store import bucket, collection, leases, roots
from rlhf_core.store.bucket import BucketStore
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.fingerprint import hash_tree, tree_digest
from rlhf_core.store.leases import Lease, hold, name_of
from rlhf_core.store.protocol import Damaged, Gone, Store, unpack
from tests.support.simulated_bucket import SimulatedBucket, unreachable

STORES = ("disk", "bucket")
GRACE_S, TTL_S, HEARTBEAT_S = 3000.0, 600.0, 100.0
RECENT_S = 30.0
"""How old a listing may be by which a run decides whether a result exists."""
DAY_S, KEEP_DAYS = 2 * GRACE_S, 20.0
"""Longer than a history, so a collection may remove no result of it."""
HOSTS = ("ada", "ben", "cy")
FRESH = "fresh"
WEIGHTS = {"k1": b"same" * 10, "k2": b"same" * 10, "k3": b"other" * 10}
"""Key -> content of its result. Two keys share an object."""
STEPS = 2
ROOT = Path("/sim")


@dataclass
class History:
    """The nodes of one history, what was acknowledged to somebody, and the promises that were broken."""

    world: World
    bucket: SimulatedBucket | None
    """None if the store is on a disk."""
    random: random.Random
    lists: bool
    """Whether runs list the store, as after a plan, or look only at the tables of a key and its object."""
    broken: list[str] = field(default_factory=list)
    results: dict[str, str] = field(default_factory=dict)
    """Key -> token of the acknowledged record."""
    saved: dict[str, int] = field(default_factory=dict)
    """Key -> step of the acknowledged checkpoint."""
    pins: set[str] = field(default_factory=set)
    holders: dict[str, str] = field(default_factory=dict)
    """Token of a lease -> process."""
    faults_left: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    stood_still_s: float = 0.0
    """How long processes were stopped or slow, added up."""
    committing: set[str] = field(default_factory=set)
    """Processes between the upload of an object and the write that refers to it."""
    unused: str = ""
    """Digest of the object of a result that was removed long ago."""

    def store(self) -> Store:
        if self.bucket is None:
            return DiskStore(ROOT / "store")
        return BucketStore(self.bucket, ROOT / current().process.host / "cache", "s3://sim")

    # ---------------------------------------------------------------- promises

    def check(self) -> None:
        """Compare the store with everything that was acknowledged."""
        for key, token in self.results.items():
            record = self.table(key).get("record")
            if record is None:
                self.broken.append(f"the record of {key} is lost")
            elif record["token"] != token:
                self.broken.append(f"{key} has two results")
            elif not self.is_whole(record["object"]):
                self.broken.append(f"the object of {key} is lost")
        for key, step in self.saved.items():
            table = self.table(key)
            if not table.get("record") and (table.get("work") or {}).get("step", 0) < step:
                self.broken.append(f"checkpoint {step} of {key} is lost")
        self.broken += [f"the pinned object {digest[:6]} is lost" for digest in self.pins if not self.is_whole(digest)]

    def check_writer(self, before: bytes | None, after: bytes) -> None:
        """Only the holder of the lease may change the record of a key."""
        old, new = (unpack(raw) or {} if raw else {} for raw in (before, after))
        holder = self.holders.get((old.get("lease") or {}).get("token", ""))
        is_new = new.get("record") and new.get("record") != old.get("record")
        if is_new and holder != current().process.name:
            self.broken.append(f"{current().process.name} wrote a record without the lease")

    def bucket_changed(self, name: str, before: bytes | None, after: bytes | None) -> None:
        if name.startswith("tables/keys/") and after is not None:
            self.check_writer(before, after)
        if not name.startswith("work/") and (after is None or name.startswith(("objects/", "tables/"))):
            self.check()

    def disk_changed(self, process: Process, call: str, path: str) -> None:
        if "/objects" in path or "/tables" in path:
            self.check()

    def table(self, key: str) -> dict[str, Any]:
        name = f"tables/{name_of(key)}"
        if self.bucket is not None:
            raw = self.bucket.entries[name][0] if name in self.bucket.entries else b""
        else:
            node = self.world.find(f"{ROOT}/store/{name}.json")
            raw = node.data if node else b""
        return unpack(raw) or {} if raw else {}

    def is_whole(self, digest: str) -> bool:
        """True if a fresh node could read the object now."""
        if self.bucket is not None:
            entries, name = self.bucket.entries, f"objects/{digest}"
            state = unpack(entries[name][0]) if name in entries else None
            if not state or not state["live"]:
                return False
            files = {f"data/{digest}-{state['live']}/{sha}": sha for _, sha in state["files"].values()}
            return all(name in entries and _sha256(entries[name][0]) == sha for name, sha in files.items())
        folder = f"{ROOT}/store/objects/{digest[:2]}/{digest}"
        manifest = self.world.find(f"{folder}/manifest.json")
        try:
            listed = json.loads(manifest.data if manifest else b"")["files"]
        except ValueError:
            return False
        nodes = {path: self.world.find(f"{folder}/{path}") for path in listed}
        return all(node is not None and _sha256(node.data) == listed[path]["sha256"] for path, node in nodes.items())

    def acknowledge(self, key: str, record: dict[str, Any]) -> None:
        if self.results.setdefault(key, record["token"]) != record["token"]:
            self.broken.append(f"{key} was returned with two results")
        self.saved.pop(key, None)
        self.check()

    # ---------------------------------------------------------------- what processes do

    def make_unused_object(self) -> None:
        """Leave an object that nobody refers to; in a bucket perhaps with the mark of a collection."""
        store = self.store()
        with hold(store, "old") as lease:
            self.holders[lease.token] = current().process.name
            self.unused = self.commit(store, lease, "old", WEIGHTS["k1"])["object"]
        table = store.read(name_of("old"))
        assert table is not None
        store.remove(table.name, table.version)
        if self.bucket is not None and self.random.random() < 0.5:
            time.sleep(1.1 * GRACE_S)
            collection.collect(store, keep_days=KEEP_DAYS)
        time.sleep(1.5 * GRACE_S)

    def run_stage(self, key: str) -> None:
        """Return the result of a key, computed if there is none."""
        store = self.store()
        if self.hit(store, key):
            return
        with hold(store, key) as lease:
            self.holders[lease.token] = current().process.name
            if not self.hit(store, key, lease):
                self.compute(store, key, lease)

    def hit(self, store: Store, key: str, lease: Lease | None = None) -> bool:
        """Return the result of a key, if it has one: by a recent look at the store, or by its table as of now under its lease."""
        with store.snapshot(within_s=RECENT_S) if self.lists and not lease else nullcontext():
            found = lease.latest() if lease else store.recent(name_of(key))
            record = None if found is None else found.value.get("record")
            if not record or store.problem(record["object"]) or not collection.note_use(store, found):
                return False
        self.acknowledge(key, record)
        if (store.fetch(record["object"]) / "weights").read_bytes() != WEIGHTS[key]:
            self.broken.append(f"{current().process.name} read wrong bytes")
        return True

    def compute(self, store: Store, key: str, lease: Lease) -> None:
        """Resume from the newest checkpoint, save one at each step, and commit."""
        attempt = {"token": lease.token, "inputs": []}
        promised = self.saved.get(key, 0)  # before the next line: from there on only this process saves, or it raises
        table = lease.update(lambda value: value | {"attempts": [*value.get("attempts", []), attempt]})
        work = table.value.get("work")
        done = work["step"] if work else 0
        if work and (lease.load_work(work) / "state").read_bytes() != _state(done):
            self.broken.append(f"checkpoint {done} of {key} is not what was saved")
        if done < promised:
            self.broken.append(f"checkpoint {promised} of {key} is lost")
        for step in range(done + 1, STEPS + 1):
            time.sleep(self.random.choice([1.0, 30.0]))
            lease.check()
            folder = _write(store.folder / "attempts" / key / lease.token / f"step-{step}", state=_state(step))
            lease.save_work(folder, step=step)
            self.saved[key] = max(step, self.saved.get(key, 0))
        record = self.commit(store, lease, key, WEIGHTS[key])
        self.acknowledge(key, record)
        lease.forget_work()

    def commit(self, store: Store, lease: Lease, key: str, weights: bytes) -> dict[str, Any]:
        folder = store.folder / "attempts" / key / lease.token / "out"
        files = hash_tree(_write(folder, weights=weights, config=b"the same in all objects"))
        record = {"object": tree_digest(files), "inputs": [], "facts": {}, "token": lease.token}
        with self._committing():
            lease.commit(record["object"], folder, files, record)
        return record

    def pin(self) -> None:
        """Pin the unused object, as a person does."""
        store = self.store()
        time.sleep(self.random.choice([0.0, 0.2, 0.9, 1.3]) * GRACE_S)
        with suppress(Gone, Damaged), self._committing():
            if store.has(self.unused):
                roots.pin(store, self.unused, "")
                self.pins.add(self.unused)
                self.check()

    def collect(self) -> None:
        for _ in range(3):
            time.sleep(self.random.choice([0.1, 0.4, 1.1]) * GRACE_S)
            with suppress(Damaged):  # a node that reads wrong bytes cannot collect
                self.collect_once()

    def collect_once(self) -> None:
        collection.collect(self.store(), keep_days=KEEP_DAYS)

    def repeat(self, key: str) -> None:
        """Run the stage until it succeeds, as a person repeats a command."""
        time.sleep(self.random.choice([0.0, 0.0, 0.3, 1.2, 2.4]) * GRACE_S)
        for _ in range(3):
            try:
                self.run_stage(key)
                return
            except (ArtifactError, OSError) as error:
                self.check_reason(error)
            time.sleep(1.0)
        self.run_stage(key)

    def check_reason(self, error: Exception) -> None:
        """A run may end because of a fault of its node, but not because of a broken response or a collection."""
        healthy = self.bucket is None or current().process.host not in self.bucket.bad_hosts
        if healthy and set(self.struck) <= {"unreachable"}:
            self.broken.append(f"a run ended although nothing but broken responses happened: {error!r}")
        in_time = self.stood_still_s < GRACE_S
        if healthy and in_time and isinstance(error, Gone):
            self.broken.append(f"a collection cost a run its commit within the grace period: {error!r}")

    @contextmanager
    def _committing(self) -> Iterator[None]:
        self.committing.add(current().process.name)
        try:
            yield
        finally:
            self.committing.discard(current().process.name)


def _write(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        with (folder / name).open("wb") as stream:
            stream.write(content)
    return folder


def _state(step: int) -> bytes:
    return f"state {step}".encode() * 9


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---------------------------------------------------------------- faults


def _faults(history: History) -> Callable[[Process, str, str], None]:
    """Faults at random operations, most often around a commit and the decisions of a collection."""
    source, world = history.random, history.world

    def strike(process: Process, call: str, path: str) -> None:
        is_important = any(part in path for part in ("objects", "tables/keys", "data", "work/", "/step-"))
        is_reference = any(part in path for part in ("tables", "locks"))
        is_committing = process.name in history.committing and is_reference
        chance = 0.2 if is_committing else 0.03 if is_important else 0.004
        if history.faults_left <= 0 or source.random() > chance:
            return
        history.faults_left -= 1
        kinds = ["stop", "stop", "stop", "kill", "power", *["slow"] * (3 if is_committing else 1)]
        is_request = call.startswith(("request", "response"))
        fault = source.choice(kinds + (["unreachable", "unreachable"] if is_request else ["EIO", "ENOSPC"]))
        history.struck[fault] += 1
        if fault in ("stop", "slow"):
            stops = [30.0, 2 * TTL_S, 2 * TTL_S, 1.2 * GRACE_S, 2.6 * GRACE_S, 2.6 * GRACE_S]
            seconds = source.choice(stops if fault == "stop" else stops[2:])
            history.stood_still_s += seconds
            if fault == "stop":
                process.stopped_until = world.now + seconds
            else:  # this thread alone: the heartbeats continue
                world.block(lambda: False, seconds)
        elif fault == "kill":
            world.kill()
        elif fault == "power":
            world.cut_power(process.host if history.bucket is not None else "")
        elif fault == "unreachable":
            raise unreachable(call)
        else:
            raise OSError(getattr(errno, fault), fault, str(ROOT))

    return strike


# ---------------------------------------------------------------- histories


@contextmanager
def _short_times() -> Iterator[None]:
    values = (
        (leases, "TTL_S", TTL_S),
        (leases, "HEARTBEAT_S", HEARTBEAT_S),
        (leases, "POLL_S", 60.0),
        (BucketStore, "grace_s", GRACE_S),
        (DiskStore, "grace_s", GRACE_S),
        (bucket, "PATIENCE_S", 60.0),
        (bucket, "RETRY_S", 5.0),
        (collection, "DAY_S", DAY_S),
    )
    with ExitStack() as stack:
        for module, name, value in values:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def play(kind: str, seed: int) -> History:
    """Play the history of a seed: old objects, some faults, runs and collections, and then a fresh node in peace."""
    source = random.Random(f"{kind}{seed}")
    world, there = World(seed, stale=kind == "disk" and source.random() < 0.3), None
    for host in (*HOSTS, FRESH, "store"):
        world.make_folder(host)
    if kind == "bucket":
        lag_s = source.choice([0.0, 0.0, 0.1, 0.5]) * GRACE_S
        there = SimulatedBucket(world, lag_s=lag_s, clock_s=source.choice([0.0, 9e4, -9e4]))
    history = History(world, there, source, lists=seed % 2 == 1)
    world.changed = history.disk_changed
    if there is not None:
        there.changed = history.bucket_changed
    with world.installed(), _short_times():
        world.start("before", "ada", history.make_unused_object)
        world.run()
        _play_with_faults(history)
        _play_in_peace(history)
    return history


def _play_with_faults(history: History) -> None:
    source, world, there = history.random, history.world, history.bucket
    if there is not None and source.random() < 0.25:
        there.bad_hosts = {source.choice(HOSTS)}
        there.wrong_tables, there.wrong_files = source.choice([0.0, 0.1, 0.6]), source.choice([0.3, 1.0])
    clocks = {host: source.choice([0.0, 0.0, 9e4, -9e4, -36e2]) for host in HOSTS}
    history.faults_left = source.choice([0, 1, 2, 3, 4])
    world.strike = _faults(history)

    def start(name: str, do: Callable[[], None]) -> None:
        host = source.choice(HOSTS)
        world.start(name, host, do, clocks[host])

    for number in range(source.choice([2, 3])):
        key = source.choice(list(WEIGHTS)[: source.choice([1, 2, 3])])
        start(f"run {number}", lambda key=key: history.repeat(key))
    if source.random() < 0.4:
        start("pin", history.pin)
    for number in range(source.choice([0, 1, 2, 2])):
        start(f"gc {number}", history.collect)
    history.broken += [f"{one.name} waits forever" for one in world.run()]
    for one in world.processes:
        expected = history.struck or (there is not None and one.host in there.bad_hosts)
        if one.error is not None and not (expected and isinstance(one.error, (ArtifactError, OSError))):
            history.broken.append(f"{one.name} ended with {one.error!r}")
    history.check()


def _play_in_peace(history: History) -> None:
    """A fresh node completes every key, and the last collection leaves no checkpoint in the bucket."""
    world, there = history.world, history.bucket
    world.strike = lambda process, call, path: None
    if there is not None:
        there.lag_s, there.bad_hosts = 0.0, set()
    for key in WEIGHTS:
        world.start(f"last {key}", FRESH, lambda key=key: history.run_stage(key))
        history.broken += [f"{one.name} waits forever" for one in world.run()]
    history.check()
    if there is not None and not history.broken:
        world.start("last gc", FRESH, lambda: (time.sleep(1.5 * GRACE_S), history.collect_once()))
        world.run()
        unfinished = any(history.table(key).get("work") for key in WEIGHTS)
        history.broken += [f"{name} is left" for name in there.entries if name.startswith("work/") and not unfinished]
    last = [one for one in world.processes if one.name.startswith("last")]
    history.broken += [f"{one.name} ended with {one.error!r}" for one in last if one.error is not None]


@dataclass
class Campaign:
    """The result of a number of histories."""

    histories: int = 0
    operations: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    broken: dict[int, str] = field(default_factory=dict)
    """Seed -> the promises that its history broke."""


def play_all(kind: str, seeds: Iterable[int], *, until_broken: bool = False) -> Campaign:
    """Play the history of each seed."""
    campaign = Campaign()
    logging.disable(logging.CRITICAL)
    try:
        for seed in seeds:
            history = play(kind, seed)
            campaign.histories += 1
            campaign.operations += history.world.operations
            campaign.struck.update(history.struck)
            if history.broken:
                campaign.broken[seed] = "; ".join(dict.fromkeys(history.broken))
                if until_broken:
                    break
    finally:
        logging.disable(logging.NOTSET)
    return campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=STORES, default="bucket")
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first history")
    options = parser.parse_args()
    began = time.process_time()
    found = play_all(options.store, range(options.seed, options.seed + options.histories))
    for seed, broken in found.broken.items():
        sys.stdout.write(f"seed {seed}: {broken}\n")
    sys.stdout.write(
        f"{options.store}: {found.histories} histories of {found.operations} operations "
        f"in {time.process_time() - began:.0f} CPU s; {dict(found.struck)}; {len(found.broken)} broke a promise\n"
    )
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
