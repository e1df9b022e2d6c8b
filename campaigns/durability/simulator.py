"""Simulate processes that share a store while they are stopped, killed and deceived, and check the store's promises.

    python -m campaigns.durability.simulator --histories 10000 --seed 0

The promises, at every instant of every history:

1. At most one record is written per lease, and only by the process that holds the lease.
2. A record never refers to an incomplete object.
3. No acknowledged result, checkpoint, answer or pin is lost: neither by a kill, a power cut nor `gc`.
4. Every process ends by itself, with its result or one error, and the next run completes.
"""

from __future__ import annotations

import argparse
import errno
import functools
import hashlib
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

from campaigns.durability.simulated_machines import ROOT, Node, Process, World, current, purpose
from rlhf_core.errors import ArtifactError
from rlhf_core.schema.base import Config
from rlhf_core.stage import key, versions
from rlhf_core.stage.checkpoints import damaged_archive
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store import leases
from rlhf_core.store.artifacts import ArtifactStore, object_digest
from rlhf_core.store.disk import DiskStore
from rlhf_core.store.layout import MANIFEST
from rlhf_core.store.protocol import unpack
from rlhf_core.types import PolicyRef

STORE = Path(ROOT) / "store"
DAY_S = 86400.0
KEEP_S = 3 * DAY_S
"""The use of a result is recorded once a day, so results used within two days must be kept."""
FAULTS = ("stop", "stop", "kill", "power cut", "EIO", "ENOSPC")
QUESTION = Question(gate="quality", condition={"after": "counting"}, digest="0" * 64, run="night")
_STUB: Any = mock.MagicMock(engines=dict)

Instants: TypeAlias = dict[tuple[str, str], Counter[str]]
"""Scene and process -> how often it does each operation."""


@dataclass
class Promises:
    """Acknowledged results with the time after which `gc` may remove them, and the broken promises."""

    world: World
    broken: list[str] = field(default_factory=list)
    saved: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Key -> step of its last checkpoint."""
    results: dict[str, float] = field(default_factory=dict)
    """Key -> time when its result was last returned to a caller."""
    pins: set[str] = field(default_factory=set)
    answers: set[str] = field(default_factory=set)
    leases: set[str] = field(default_factory=set)
    """Tokens of the leases under which a record was written."""
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path of the table of a key -> its value after the last write."""

    def changed(self, process: Process, call: str, path: str) -> None:
        """Check the disk after a change of names."""
        if call in ("rename", "link") and path.startswith(f"{STORE}/tables/keys/"):
            node = self.world.find(path)
            before, after = self.tables.get(path, {}), _table(node.data if node else b"")
            if after.get("record") not in (None, before.get("record")):
                self._check_writer(process, before.get("lease") or {})
            self.tables[path] = after
        if path.startswith((f"{STORE}/tables/keys", f"{STORE}/objects", f"{STORE}/trash", f"{STORE}/quarantine")):
            self.check_records()

    def _check_writer(self, process: Process, owner: dict[str, Any]) -> None:
        if (owner.get("host"), owner.get("pid")) != (process.host, process.number):
            self.broken.append(f"{process.name} wrote a record without the lease")
        elif owner["token"] in self.leases:
            self.broken.append(f"{process.name} wrote two records under one lease")
        self.leases.add(owner.get("token", ""))

    def check_records(self) -> None:
        """Check that every record refers to a complete object."""
        for name, table in self.below("tables/keys"):
            record = _table(table.data).get("record")
            if not record:
                continue
            digest = record["object"]
            try:
                found = {path: hashlib.sha256(file.data).hexdigest() for path, file in self.below(_place(digest))}
                manifest = self.world.find(f"{STORE}/{_place(digest)}/{MANIFEST}")
                listed = {
                    path: one["sha256"] for path, one in json.loads(manifest.data if manifest else "")["files"].items()
                }
                whole = listed == {path: found[path] for path in found if path != MANIFEST}
            except ValueError:
                whole = False
            if not whole:
                self.broken.append(f"the record {name[:6]} leads to less than a whole object")

    def check_kept(self) -> None:
        """Check that everything acknowledged is on the disk."""
        self.check_records()
        records = {
            name.removesuffix(".json") for name, file in self.below("tables/keys") if _table(file.data).get("record")
        }
        lost = [f"the result {key[:6]}" for key, at in self.results.items() if key not in records and self.counts(at)]
        pins = {str(_table(file.data).get("target")) for _, file in self.below("tables/pins")}
        pinned = {digest for digest in pins if self.world.find(f"{STORE}/{_place(digest)}/{MANIFEST}")}
        lost += [f"the pin of {digest[:6]}" for digest in self.pins - pinned]
        answers = {one["reason"] for _, file in self.below("tables/gates") for one in _table(file.data)["answers"]}
        lost += [f"the answer of {name}" for name in self.answers - answers]
        self.broken += [f"{one} is lost" for one in lost]

    def counts(self, at: float) -> bool:
        """Whether `gc` has to keep results that were last used at this time."""
        return self.world.now - at < KEEP_S - DAY_S

    def below(self, place: str) -> Iterator[tuple[str, Node]]:
        """Yield name and node of each file below a folder of the store, except temporary ones."""
        folder = self.world.find(f"{STORE}/{place}")
        for name, inside in list((folder.entries or {}).items()) if folder else ():
            if inside.entries is not None:
                yield from self.below(f"{place}/{name}")
            elif not name.startswith("."):
                yield name, inside


def _table(content: bytes) -> dict[str, Any]:
    """The value of a table, {} if it does not exist or is incomplete."""
    return unpack(content) or {} if content else {}


def _place(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"


# ---------------------------------------------------------------- work of the processes

_promises: Promises


class CountingConfig(Config):
    steps: int = 2


def run(config: CountingConfig, *, context: StageContext) -> PolicyRef:
    """Count to `steps` with a checkpoint at each step; the artifact has two files."""
    promises = _promises
    checkpoint = context.checkpoints.to_resume(damaged_archive)
    done, (saved, at) = checkpoint.step if checkpoint else 0, promises.saved.get(context.key, (0, 0.0))
    if done < saved and promises.counts(at):
        promises.broken.append(f"the checkpoint of step {saved} is lost")
    kept = checkpoint.path / "weights" if checkpoint else None
    if kept and (not kept.exists() or kept.read_bytes() != _weights(done)):
        promises.broken.append(f"the checkpoint of step {done} is not what was saved")
    for step in range(done + 1, config.steps + 1):
        time.sleep(promises.world.random.choice([1.0, 30.0]))
        if context.stopping():
            context.stop()
        with context.checkpoints.saving(step, {}) as folder:
            (folder / "weights").write_bytes(_weights(step))
        context.checkpoints.settle()
        promises.saved[context.key] = step, promises.world.now
    for name in ("weights", "config"):
        (context.out / name).write_bytes(name.encode() * 20)
    return context.commit(PolicyRef)


def _weights(step: int) -> bytes:
    return b"w" * 50 * step


def work() -> None:
    """Run the stage; its result is acknowledged."""
    spec = StageSpec(name="counting", module=run.__module__, version=1, code="warn", config=CountingConfig(), inputs={},
                     seed=1, label="counting", engines={})  # fmt: skip
    promises, forced = _promises, current().process.name == "forced"

    def decided(made: Decision) -> None:
        if forced:  # earlier checkpoints must be discarded
            promises.saved.pop(made.key, None)

    _, made = execute(
        ArtifactStore(STORE),
        spec,
        runtime=_STUB,
        tracker=_STUB,
        progress=_STUB,
        force=forced,
        on_decision=decided,
    )
    promises.saved.pop(made.key, None)
    promises.results[made.key] = promises.world.now


def pin() -> None:
    store = ArtifactStore(STORE)
    for record in store.records():
        store.pin(object_digest(record.handle))
        _promises.pins.add(object_digest(record.handle))


def answer() -> None:
    decisions, who = GateDecisions(DiskStore(STORE)), current().process.name
    decisions.decide(decisions.ask(QUESTION, run=who, links={}), "approve", reason=who, by="ada")
    _promises.answers.add(who)


def collect() -> None:
    ArtifactStore(STORE).gc(dry_run=False, keep_days=KEEP_S / DAY_S)


def late(then: Callable[[], None]) -> Callable[[], None]:
    """`then`, delayed to a time at which unused results need not be kept."""

    def do() -> None:
        time.sleep(2 * KEEP_S + _promises.world.random.uniform(0.0, 0.2))
        then()

    return do


SCENES: dict[str, dict[str, Callable[[], None]]] = {
    "two runs": {"run": work, "other": work},
    "a forced run": {"forced": work, "other": work},
    "a late pin": {"run": work, "pin": late(pin), "gc": late(collect)},
    "a late hit": {"run": work, "other": late(work), "gc": late(collect)},
    "answers": {"ada": answer, "bob": answer, "run": work},
}
LAST = "last"


# ---------------------------------------------------------------- histories


@dataclass
class Campaign:
    """Findings of a number of histories: the seeds of histories that broke a promise, and the promises."""

    histories: int = 0
    operations: int = 0
    broken: dict[int, str] = field(default_factory=dict)
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operation and fault -> how often it occurred there."""
    seen: Instants = field(default_factory=dict)


def play(seeds: range, *, locks: str = "sound", until_broken: bool = False) -> Campaign:
    """Play a history for each seed, with two faults at operations drawn from undisturbed histories."""
    campaign, peace = Campaign(), Campaign()
    digests = functools.cache(key.module_digests)
    versions.environment()  # the first call waits for git, and so for the real clock
    logging.disable(logging.CRITICAL)
    try:
        with (
            mock.patch.object(leases, "POLL_S", 12.0),
            mock.patch.object(key, "module_digests", digests),
        ):
            for seed in range(30):
                _play(seed, {}, peace, locks)
            if peace.broken:
                return peace
            for seed in seeds:
                _play(seed, peace.seen, campaign, locks)
                if campaign.broken and until_broken:
                    break
    finally:
        logging.disable(logging.NOTSET)
    return campaign


def _play(seed: int, instants: Instants, campaign: Campaign, locks: str) -> None:
    global _promises
    source = random.Random(seed)
    world = World(seed, stale=source.random() < 0.3, locks=locks)
    promises = _promises = Promises(world)
    world.make_folder("store")
    scene = source.choice(list(SCENES))
    faults = dict(_fault(scene, instants, source) for _ in range(2 if instants else 0))
    seen: Instants = {(scene, who): Counter() for who in (*SCENES[scene], LAST)}

    def strike(process: Process, call: str, path: str) -> None:
        operation = f"{call} {purpose(path)}"
        seen[scene, process.name][operation] += 1
        fault = faults.get((process.name, operation, seen[scene, process.name][operation]), "")
        campaign.struck[operation, fault] += bool(fault)
        if fault == "stop":
            process.stopped_until = world.now + source.choice([30.0, 400.0, 400.0, 400.0])
        elif fault == "kill":
            world.kill()
        elif fault == "power cut":
            world.cut_power()
        elif fault:
            raise OSError(getattr(errno, fault), fault, str(STORE))

    world.strike, world.changed = strike, promises.changed
    with world.installed():
        for actors in (SCENES[scene], {LAST: work}):
            for who, do in actors.items():
                world.start(who, source.choice(["here", "there"]), do, source.choice([0.0, 0.0, -3600.0, 3600.0]))
            promises.broken += [f"{one.name} waits for ever" for one in world.run()]
            promises.check_kept()
    for one in world.processes:
        if one.error is not None and (one.name == LAST or not isinstance(one.error, (ArtifactError, OSError))):
            promises.broken.append(f"{one.name} ended with {one.error!r}")
    campaign.seen |= {who: campaign.seen.get(who, Counter()) | counted for who, counted in seen.items()}
    campaign.histories, campaign.operations = campaign.histories + 1, campaign.operations + world.operations
    campaign.broken |= {seed: "; ".join(promises.broken)} if promises.broken else {}


def _fault(scene: str, instants: Instants, source: random.Random) -> tuple[tuple[str, str, int], str]:
    """Draw the place of a fault (process, operation, occurrence) and the fault; most of them hit the record."""
    who = source.choice([who for who in SCENES[scene] if instants[scene, who]])
    operations = instants[scene, who]
    weights = [
        20 if "in commit" in name else 1 if "attempts" in name or "quarantine" in name else 3 for name in operations
    ]
    (name,) = source.choices(list(operations), weights)
    return (who, name, source.randint(1, operations[name])), source.choice(FAULTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--locks", choices=["sound", "of one host"], default="sound", help="what flock does")
    options = parser.parse_args()
    began = time.monotonic()
    found = play(range(options.seed, options.seed + options.histories), locks=options.locks)
    for seed, broken in found.broken.items():
        sys.stdout.write(f"seed {seed}: {broken}\n")
    faults = Counter(fault for _, fault in found.struck.elements())
    places = len({operation for operation, fault in found.struck if fault})
    sys.stdout.write(
        f"{found.histories} histories of {found.operations} operations in {time.monotonic() - began:.0f} s; "
        f"{dict(faults)} at {places} operations; {len(found.broken)} broke a promise\n"
    )
    return 1 if found.broken else 0


if __name__ == "__main__":
    from campaigns.durability import simulator  # the stage is found by the name of its module

    sys.exit(simulator.main())
