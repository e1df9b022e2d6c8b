"""Compute keys as a run does, with short leases: `python -m tests.support.lease_chaos STORE LOGS NUMBER SKEW KEY...`.

Writes a line for each key that this process has committed to NUMBER.log in the folder LOGS. If the store is a bucket, the
processes are on `NODES` nodes, each with a folder that mirrors it.
"""

import os
import random
import secrets
import sys
import time
from pathlib import Path

from rlhf_core.errors import ArtifactError
from rlhf_core.store import leases
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.places.mirror import store_root
from rlhf_core.types import PolicyRef
from tests.support.records import provenance, write_files

TTL_S, BEAT_S = 1.5, 0.25
NODES = 3


def hurry() -> None:
    """Make leases short; a process that is stopped for longer than `TTL_S` loses its own."""
    leases.TTL_SECONDS, leases.HEARTBEAT_SECONDS, leases.WATCH_SECONDS = TTL_S, BEAT_S, 2.25 * BEAT_S
    leases.POLL_SECONDS = 0.05


def compute(store: ArtifactStore, key: str, log: Path) -> None:
    """Commit a result of `key` that names this attempt, unless there is one; say what came of it."""
    if store.record(key) is not None:
        return
    with store.lease(key) as lease:
        if store.record(key) is not None:
            return
        token = secrets.token_hex(4)
        out = write_files(store.layout.attempts / f"out-{token}", {"a.txt": token})
        time.sleep(random.uniform(0.05, 0.3))
        said = "committed"
        try:
            record = provenance(label=token, attempts=1)
            store.commit(key, out, PolicyRef, children={}, record=record, lease=lease)
        except ArtifactError:
            said = "fenced"
        with log.open("a") as stream:
            stream.write(f"{said} {key} {token}\n")


def main(place: str, logs: str, number: str, skew: str, *keys: str) -> None:
    """Compute all keys, in an order of this process, with a clock that is wrong by `skew` seconds."""
    hurry()
    now = time.time
    time.time = lambda: now() + float(skew)
    if "://" in place:
        node = f"node-{int(number) % NODES}"
        os.environ["RLHF_CACHE"] = f"{logs}/{node}"
        leases.here = lambda: (node, "boot", "pids")
    store = ArtifactStore(store_root(place))
    log = Path(logs) / f"{number}.log"
    log.touch()
    for key in random.Random(number).sample(keys, len(keys)):
        compute(store, key, log)


if __name__ == "__main__":
    main(*sys.argv[1:])
