"""Count the bucket requests and the seconds of typical operations on a store with many results.

    python -m campaigns.durability.bucket_requests --keys 5000 --delay 0.05

The bucket is in memory; each request takes `--delay` seconds. A warm node has used the store before, in another process.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from rlhf_core.store import unfinished
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.bucket_server import FOLDER
from rlhf_core.store.fingerprint import FileEntry, sha256_text, tree_digest
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import pack
from tests.support.buckets import Nodes
from tests.support.records import commit_text
from tests.support.toy_stage import ToyConfig, run_toy, toy_spec

LOOK_S, STEP_S = 0.05, 1.5
"""A checkpoint is uploaded immediately, and before the next one is written."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=5000, help="results in the store (default 5000)")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that a request takes (default 0)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        nodes = Nodes(Path(folder), patch)
        fill(nodes, options.keys)
        nodes.client.delay_s = options.delay
        sys.stdout.write(f"{options.keys} keys, {options.delay * 1000:.0f} ms a request\n\n")
        sys.stdout.write("| operation | requests | seconds |\n|---|--:|--:|\n")
        measure(nodes)
    return 0


def measure(nodes: Nodes) -> None:
    """Print a line for each operation."""

    def row(name: str, node: str, do: Callable[[ArtifactStore], Any]) -> None:
        nodes.client.requests.clear()
        began = time.monotonic()
        do(nodes.store(node))
        made = dict(sorted(nodes.client.requests.items()))
        seconds = time.monotonic() - began
        sys.stdout.write(f"| {name} {made} | {sum(made.values())} | {seconds:.1f} |\n")
        sys.stdout.flush()

    config = load_profile("tiny/full")
    row("first open, and a plan", "ben", lambda store: plan_stages(config, store))
    row("plan on a warm node", "ben", lambda store: plan_stages(config, store))
    quick, stage = (toy_spec(ToyConfig(steps=4, seconds_a_step=seconds, kl_coef=seconds)) for seconds in (0.25, STEP_S))
    row("a stage with four checkpoints in a second", "ada", lambda store: run_toy(store, quick))
    with mock.patch.object(unfinished, "LOOK_SECONDS", LOOK_S):
        row("a stage whose four checkpoints are uploaded", "ada", lambda store: run_toy(store, stage))
    row("the first hit of another node", "ben", lambda store: run_toy(store, stage))
    row("a hit on a warm node", "ben", lambda store: run_toy(store, stage))
    row("gc", "ada", lambda store: store.gc(dry_run=False))
    row("gc again", "ada", lambda store: store.gc(dry_run=False))
    row("verify", "ben", lambda store: store.verify())


def fill(nodes: Nodes, many: int) -> None:
    """Write this many results to the bucket, each with an object."""
    ada = nodes.store("ada")
    first = commit_text(ada, "first")
    key, state = ada.shared.read(name_of(sha256_text("first"))), ada.shared.read(f"objects/{first.digest}")
    assert key is not None and state is not None
    for number in range(many - 1):
        text = f"result {number}"
        sha = sha256_text(text)
        digest = tree_digest({"a.txt": FileEntry(len(text), sha)})
        put(nodes, f"data/{digest}-1/{sha}", text.encode())
        put(nodes, f"objects/{digest}", pack(state.value | {"files": {"a.txt": [len(text), sha]}, "live": "1"}))
        put(nodes, f"tables/{name_of(sha)}", pack(_renamed(key.value, sha, digest)))


def _renamed(value: Mapping[str, Any], key: str, digest: str) -> dict[str, Any]:
    """A copy of a key's table for another key and another object."""
    facts = value["record"]["facts"]
    fields = facts["handle"]["fields"] | {"uri": f"store://{digest}", "digest": digest}
    handle = facts["handle"] | {"fields": fields}
    return dict(value) | {
        "record": value["record"] | {"object": digest, "facts": facts | {"key": key, "handle": handle}}
    }


def put(nodes: Nodes, name: str, content: bytes) -> None:
    nodes.client.memory.put(f"{FOLDER}{name}", content)


if __name__ == "__main__":
    sys.exit(main())
