"""A run on nodes that share a bucket and nothing else: the same bits as on one machine with a disk, whatever dies."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import soon
from tests.support.nodes import RAY_PORT, Node, network
from tests.support.object_servers import Server, environment

PROFILE = """
name = "nodes"
[runtime]
train_workers = 2
cpu_threads = 1
worker_timeout_s = 200
[runtime.trainer]
engine = "deepspeed"
zero_stage = 2
[runtime.sampler]
type = "hf"
[prepare_data]
max_prompt_tokens = 64
max_tokens = 96
data = {type = "support", demonstrations = 48, preferences = 48, prompts = 16, eval_demonstrations = 8, \
eval_preferences = 8, eval_prompts = 4}
model = {type = "init", vocab_size = 400, hidden_size = 64, layers = 2, heads = 2, kv_heads = 2, \
intermediate_size = 128, max_positions = 96}
[sft]
loop = {batch_size = 8, epochs = 1, checkpoint_every = 2}
[reward_model]
loop = {batch_size = 8, epochs = 1, checkpoint_every = 2}
[ppo]
steps = 6
prompts_per_step = 4
sampling = {max_tokens = 16}
checkpoint_every = 1
value = {}
[ppo.rewards.terms.reward_model]
type = "reward_model"
"""
STORE = "s3://rlhf/team"
READS = """
import json, sys
from rlhf_core.store.layout import folder_bytes
from rlhf_core.store.opening import open_store, store_root

store = open_store(store_root(sys.argv[1]))
store.fetch(sys.argv[2])
objects = (store.folder / "objects").glob("*/*")
print(json.dumps(["cached", {path.name: folder_bytes(path) for path in objects}]))
"""
"""Reads an object as a stage does, and prints what is in the cache of the node then."""


@dataclass
class Run:
    """A run in progress, which writes lines of JSON to `log`."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self, kind: str) -> list[Any]:
        lines = [line for line in self.log.read_text().splitlines() if line.startswith(f'["{kind}"')]
        return [json.loads(line)[1:] for line in lines]

    def until(self, condition: Callable[[], bool]) -> None:
        soon(lambda: condition() or self.process.poll() is not None, within_s=400)
        assert self.process.poll() is None, self.log.read_text()[-4000:]

    def digests(self) -> dict[str, str]:
        self.process.wait(500)
        assert self.process.returncode == 0, self.log.read_text()[-4000:]
        found: dict[str, str] = self.said("digests")[0][0]
        return found


class Bed:
    """Two nodes with Ray, an S3, and the profile on both."""

    def __init__(self, folder: Path, server: Server, nodes: list[Node]) -> None:
        self.folder, self.server, self.nodes = folder, server, nodes
        for node in nodes:
            (node.own / "profile.toml").write_text(PROFILE)
        ada = nodes[0]
        self.rays = [
            ada.start_ray(folder / "ray0.log", "--head", f"--port={RAY_PORT}", "--include-dashboard=false"),
            nodes[1].start_ray(folder / "ray1.log", f"--address={ada.address}:{RAY_PORT}"),
        ]

    def reads(self, node: Node, digest: str, **environment: str) -> dict[str, int]:
        """Return digest and bytes of each object in the cache of a node after it has read one."""
        log = self.folder / f"reads-{digest}.log"
        log.unlink(missing_ok=True)
        run = Run(node.start([sys.executable, "-c", READS, STORE, digest], log, **environment), log)
        assert run.process.wait(200) == 0, log.read_text()
        found: dict[str, int] = run.said("cached")[0][0]
        return found

    def run(self, node: Node, name: str, place: str = STORE, **environment: str) -> Run:
        log = self.folder / f"{name}.log"
        command = [sys.executable, "-m", "tests.support.spread_run", "/tmp/profile.toml", place]
        joined = {"RAY_ADDRESS": f"{self.nodes[0].address}:{RAY_PORT}", "RAY_AUTH_MODE": "disabled"}
        joined["NODE_ADDRESS"] = node.address
        return Run(node.start(command, log, **(joined | environment)), log)


@pytest.fixture(scope="module")
def bed(tmp_path_factory) -> Iterator[Bed]:
    # A short path: Ray's sockets are below it.
    folder = Path(tempfile.mkdtemp(prefix="bed-", dir="/tmp"))
    access: dict[str, str] = {}
    with network(folder, ["ada", "ben"], access) as (host, nodes), Server("seaweedfs", folder, host) as server:
        access |= environment(server.address)
        yield Bed(folder, server, nodes)
    shutil.rmtree(folder)


def _ranks(node: Node) -> list[int]:
    """Return the train workers on a node."""
    return [process.pid for process in node.processes() if process.name().startswith("ray::TrainWorke")]


@pytest.mark.timeout(1500)  # starts engines four times, which takes ten minutes on a busy machine
@pytest.mark.services
@pytest.mark.slow
@pytest.mark.engine
def test_whatever_dies_the_bits_are_those_of_one_machine_with_a_disk(bed):
    ada, ben = bed.nodes
    expected = bed.run(ada, "disk", "/tmp/store", RAY_ADDRESS="").digests()

    first = bed.run(ada, "first")
    first.until(lambda: ["sft", 3] in first.said("progress"))
    bed.server.process.kill()
    bed.server.process.wait()
    bed.server.start()
    first.until(lambda: ["reward_model", 3] in first.said("progress"))
    (rank,) = _ranks(ben)
    os.kill(rank, signal.SIGKILL)
    first.until(lambda: ["ppo"] in first.said("kept"))
    first.process.kill()
    first.process.wait()

    [copy] = (ben.own / "cache").glob(f"*/objects/*/{expected['sft']}/model.safetensors")
    whole = copy.read_bytes()
    copy.chmod(0o644)
    copy.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    second = bed.run(ben, "second")
    assert second.digests() == expected
    assert copy.read_bytes() == whole, "the flipped bit was found, and the copy fetched again"
    assert second.said("finished")[:3] == [[label, "HIT"] for label in ("prepare_data", "sft", "reward_model")]
    assert second.said("finished")[3:] == [["ppo", "RESUME"]]

    again = bed.run(ada, "again")
    assert again.digests() == expected
    assert {action for _, action in again.said("finished")} == {"HIT"}

    kept = [bed.reads(ada, digest) for digest in expected.values()][-1]
    assert kept.keys() >= set(expected.values())
    least = max(kept.values()) + 1
    small = {"RLHF_CACHE": "/tmp/small", "RLHF_CACHE_GIB": f"{least / 2**30:.15f}"}
    for digest in [*expected.values()] * 2:  # the second time each has been evicted by the others
        cached = bed.reads(ada, digest, **small)
        assert cached[digest] == kept[digest] and sum(cached.values()) <= least < sum(kept.values())
