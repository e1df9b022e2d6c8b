"""Compute results on a store while others are killed: `python -m tests.support.node_chaos STORE LOGS NODE SEED SKEW ROUNDS`.

Leases are short. NODE.begun has a character for each result begun, and a line in NODE.log says what came of it. All nodes
compute the results of a round, each in its own order. ROUNDS = 0: until the file LOGS/enough exists at the end of a round.
If the store is in a bucket, each process is a node with a cache in LOGS/NODE, and collects now and then.
"""

import itertools
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.errors import ArtifactError
from rlhf_core.store import bucket, leases, unfinished
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.opening import store_root
from tests.support.toy_stage import ToyConfig, run_toy, toy_spec

TTL_S, BEAT_S = 8.0, 1.0
GRACE_S = 25.0
STEPS = 4
ROUND = 6
"""Results in a round."""
_TRIES = 8


def open_node(place: str, logs: Path, node: str) -> ArtifactStore:
    """The store as this node sees it, with short times for everything that waits."""
    leases.TTL_S, leases.HEARTBEAT_S, leases.POLL_S, leases.LOOK_S = TTL_S, BEAT_S, 0.05, 0.2
    unfinished.LOOK_SECONDS = 0.2
    bucket.BucketStore.grace_s, bucket.RETRY_S = GRACE_S, 0.2
    if "://" in place:
        os.environ["RLHF_CACHE"] = str(logs / node)
        leases.here = lambda: (node, "boot", "pids")
    return ArtifactStore(store_root(place))


def run_number(store: ArtifactStore, number: int) -> tuple[str, str]:
    """Run the stage with this number; returns the action and what the result says."""
    ref, decision = run_toy(store, toy_spec(ToyConfig(kl_coef=number, steps=STEPS, seconds_a_step=0.2)))
    return decision.action, (store.path(ref) / "total.txt").read_text().strip()


def expected(number: int) -> str:
    """The result: number * (1 + 2 + 3 + 4) + 4 * seed."""
    return f"{float(10 * number + 28)}"


def numbers(order: random.Random, logs: Path, rounds: int) -> Iterator[int]:
    """The results to compute: those of each round in random order."""
    for first in itertools.count(0, ROUND):
        yield from order.sample(range(first, first + ROUND), ROUND)
        if first == (rounds - 1) * ROUND or (not rounds and (logs / "enough").exists()):
            return


def main(place: str, logs: str, node: str, seed: str, skew: str, rounds: str) -> None:
    """Run all stages, in an order of this process, with a clock that is wrong by `skew` seconds."""
    logging.basicConfig(level=logging.ERROR)
    now = time.time
    time.time = lambda: now() + float(skew)
    log, begun, source = Path(logs) / f"{node}.log", Path(logs) / f"{node}.begun", random.Random(seed)
    store = open_node(place, Path(logs), node)
    for number in numbers(source, Path(logs), int(rounds)):
        with begun.open("a") as stream:
            stream.write(".")
        said = ""
        for _ in range(_TRIES):
            try:
                action, result = run_number(store, number)
                said = f"{action} {number} {result}"
                break
            except (ArtifactError, OSError) as error:
                said = f"error {number} {type(error).__name__}: {error}".replace("\n", " ")
                time.sleep(1.0)
        if "://" in place and source.random() < 0.2:
            store.gc(dry_run=False)
        with log.open("a") as stream:
            stream.write(f"{said}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
