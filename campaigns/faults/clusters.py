"""Cause faults of an existing Ray (`RAY_ADDRESS`): a head and two nodes on this machine, each with a fake GPU.

The trainer uses the GPU of one node, so if that node dies, the trainer dies, too. The sampler is the plain one, which
needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil

from benchmarks.processes import kill_family
from campaigns.faults.fault import Fault, Outcome
from campaigns.faults.made_up_gpu import TrainWorkerOnCpu
from campaigns.faults.small import Small
from pipelines.execution.executor import Silent
from rlhf_core.errors import RlhfError
from rlhf_core.runtime import liveness, ray_runtime
from rlhf_core.runtime.cluster import free_port
from rlhf_core.runtime.connection import RECONNECT_TIMEOUT_S

OVERRIDES = ("runtime.gpus_per_train_worker=1", "runtime.trainer.engine=torch", 'runtime.sampler={type = "hf"}')
UP_TIMEOUT_S = 120.0
AWAY_S = 10.0
PAUSE_S = 5.0
"""Seconds between steps until the fault is detected; without this pause the stage would finish first."""
START_ATTEMPTS = 3
NODE_LOST_S = 60.0
"""Ray probes a node every 3 s and declares it dead after 5 probes without a response, each of which may take 10 s."""


class Cluster:
    """A Ray head and nodes, started with `ray start` as a person would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.address = f"127.0.0.1:{self._port}"
        self._head: subprocess.Popen[bytes] | None = None
        self._nodes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the head, and then two nodes with a GPU each, one after the other, and wait until all have joined."""
        self._head = self._started("--head", f"--port={self._port}", "--num-gpus=0", "--include-dashboard=false")
        self._nodes = [self._started(f"--address={self.address}", "--num-gpus=1") for _ in range(2)]

    def kill(self) -> None:
        """Kill all machines of the cluster at once."""
        for process in (self._head, *self._nodes):
            if process is not None:
                kill_family(process.pid)
                process.wait()

    def kill_node_of(self, pid: int) -> None:
        """Kill the machine on which process `pid` runs."""
        node = next(
            one for one in self._nodes if any(parent.pid == one.pid for parent in psutil.Process(pid).parents())
        )
        kill_family(node.pid)
        node.wait()

    def _started(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a head or node and wait for it. Ray gives up after 30 s, as on a busy machine, so it is retried."""
        for _ in range(START_ATTEMPTS):
            log = self._folder / f"ray-{time.monotonic_ns()}.log"
            process = self._ray(log, *options)
            deadline = time.monotonic() + UP_TIMEOUT_S
            while process.poll() is None and time.monotonic() < deadline:
                if "Ray runtime started" in log.read_text(encoding="utf-8"):
                    return process
                time.sleep(0.2)
            kill_family(process.pid)
            process.wait()
        raise TimeoutError(
            f"ray start {' '.join(options)} failed {START_ATTEMPTS} times: {log.read_text(encoding='utf-8')[-500:]}"
        )

    def _ray(self, log: Path, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        place = ["--node-ip-address=127.0.0.1", "--num-cpus=4", "--object-store-memory=200000000"]
        if "--head" in options:
            place.append(f"--temp-dir={tempfile.mkdtemp(prefix='rlhf-faults-', dir='/tmp')}")
        # A head requires the user's token if one exists; a node sends it only if configured to.
        asks = (Path.home() / ".ray" / "auth_token").exists()
        environment = os.environ | ({"RAY_AUTH_MODE": "token"} if asks else {})
        with log.open("wb") as output:
            return subprocess.Popen([*command, *place, *options], env=environment, stdout=output, stderr=output)


@contextmanager
def _joined(folder: Path, name: str) -> Iterator[tuple[Cluster, Small]]:
    """Yield a cluster and the small pipeline on it, after one undisturbed run."""
    import ray

    ray.shutdown()  # left by earlier faults: a process can use only one Ray at a time
    place = folder / name
    place.mkdir()
    cluster, small = Cluster(place), Small(place, OVERRIDES)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        cluster.start()
        with mock.patch.object(ray_runtime, "TrainWorker", TrainWorkerOnCpu):
            small.digests = small.run(Silent())
            yield cluster, small
    finally:
        small.runtime.close()
        ray.shutdown()  # while the head is still alive
        cluster.kill()
        del os.environ["RAY_ADDRESS"]


def _trainer(cluster: Cluster) -> int:
    """The process id of the trainer."""
    workers = (process for node in cluster._nodes for process in psutil.Process(node.pid).children(recursive=True))
    return next(worker.pid for worker in workers if worker.name().startswith("ray::TrainWorke"))


def _node_lost(folder: Path) -> Outcome:
    with _joined(folder, "node") as (cluster, small):
        return small.recover("ppo", 2, lambda: cluster.kill_node_of(_trainer(cluster)), pause_s=PAUSE_S)


def _head_comes_back(folder: Path) -> Outcome:
    back = threading.Timer(AWAY_S, lambda: cluster.start())

    def restart() -> None:
        cluster.kill()
        back.start()

    with _joined(folder, "back") as (cluster, small):
        try:
            return small.recover("ppo", 2, restart, pause_s=PAUSE_S)
        finally:
            if back.is_alive():
                back.join()  # otherwise its children would be left over


def _head_stays_away(folder: Path) -> Outcome:
    with _joined(folder, "away") as (cluster, small):
        began = time.monotonic()
        outcome = small.recover("ppo", 2, cluster.kill, pause_s=PAUSE_S)
        took = time.monotonic() - began
        if outcome.result == "recovered" or "no Ray head answers" not in outcome.said:
            return Outcome("not handled", None, took, outcome.said)
        cluster.start()
        try:
            same = small.run(Silent()) == small.digests
        except RlhfError as error:
            return Outcome("not handled", None, took, f"did not resume: {error}")
        return Outcome("one error" if same else "not handled", took, None, outcome.said)


GONE_S = liveness.REFUSALS * liveness.WATCH_EVERY_S + 10.0

FAULTS: list[Fault] = [
    Fault("Ray node lost, of RAY_ADDRESS", NODE_LOST_S, _node_lost),
    Fault("Ray head lost and restarted, of RAY_ADDRESS", GONE_S, _head_comes_back),
    Fault("Ray head lost for good, of RAY_ADDRESS", RECONNECT_TIMEOUT_S + 60.0, _head_stays_away),
]
