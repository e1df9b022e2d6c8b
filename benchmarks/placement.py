"""Where workers land on a cluster of several nodes, whose GPUs are made up: Ray deals them out as it does real ones.

    python -m benchmarks.placement                  # 4 nodes of 8 GPUs

Prints the node and the GPUs of each rank and engine, for each way to share GPUs, with and without a pool; the same after a
node was lost and has come back; and what two engines do of which one is ten times slower. Nothing computes here.
"""

import argparse
import logging
import sys
import time
from collections import Counter
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import PoolConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.errors import SamplingError
from rlhf_core.runtime.handles import RaySampler
from rlhf_core.runtime.placement import Placement, gpu_order, reserve
from rlhf_core.runtime.worker_group import WorkerGroup
from rlhf_core.types import SamplingRequest, ids

JUDGES = {"judges": PoolConfig(workers=8, gpus_per_worker=1, roles=("reference", "reward_model"))}
CASES: dict[str, tuple[int, float, int, float, dict[str, PoolConfig]]] = {
    "apart": (16, 1, 16, 1, {}),
    "colocated": (32, 0.5, 32, 0.5, {}),
    "apart, engines of 4 GPUs": (16, 1, 4, 4, {}),
    "apart, with a pool": (16, 1, 8, 1, JUDGES),
    "colocated, with a pool": (24, 0.5, 24, 0.5, JUDGES),
}
"""Name -> train workers, GPUs of each, engines, GPUs of each, pools."""


class Actor:
    """Says where it is, or takes `seconds` for each call as an engine that samples."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._held: list[tuple[int, Any]] = []

    def gpus(self) -> list[str]:
        import ray

        context = ray.get_runtime_context()
        return [f"{context.get_node_id()}:{gpu}" for gpu in context.get_accelerator_ids()["GPU"]]

    def advance(self, new: list[tuple[int, Any]], sampling: SamplingConfig) -> list[tuple[int, str]]:
        self._held += new
        time.sleep(self._seconds)
        return [(self._held.pop(0)[0], "done")] if self._held else []


def config_of(case: str) -> RuntimeConfig:
    """Return the runtime of a case."""
    workers, share, engines, gpus, pools = CASES[case]
    sampler = VllmSamplerConfig(engines=engines, tensor_parallel=max(1, int(gpus)))
    return RuntimeConfig(
        train_workers=workers, gpus_per_train_worker=share, gpus_per_engine=gpus, sampler=sampler, pools=pools
    )


def rows(case: str, nodes: list[str]) -> list[str]:
    """Return the rows of a case: each kind of worker with its GPUs, node by node, in the order of ranks."""
    import ray

    reserved: Placement = reserve(config_of(case))
    made = []
    try:
        for kind, places in (("ranks", reserved.train), ("engines", reserved.sample), *reserved.pools.items()):
            actors = [ray.remote(Actor).options(**options).remote() for options in places]
            gpus = ray.get([actor.gpus.remote() for actor in actors], timeout=600)
            for actor in actors:
                ray.kill(actor)
            ordered = [gpus[at] for at in gpu_order(gpus)]
            found: dict[str, list[str]] = {}
            for own in ordered:
                found.setdefault(own[0].partition(":")[0], []).append("+".join(gpu.partition(":")[2] for gpu in own))
            cells = [f"{chr(ord('a') + nodes.index(node))}: {' '.join(each)}" for node, each in found.items()]
            made.append(f"| {case} | {kind} | {'; '.join(cells)} |")
    finally:
        ray.util.remove_placement_group(reserved.group)
    return made


def shares(seconds: float, requests: int) -> tuple[Counter[str], float]:
    """Return how many requests a fast engine and one that is ten times slower have done, and the seconds it took."""
    import ray

    actors = [ray.remote(Actor).options(num_cpus=0).remote(each) for each in (seconds, 10 * seconds)]
    group = WorkerGroup("sampler", actors, SamplingError, timeout_s=600.0, log_folder="", ray_lost=str)
    sampler = RaySampler(group, transfer="", tensor_parallel=1)
    waiting = [(number, SamplingRequest(ids((1,)), number)) for number in range(requests)]
    done: Counter[str] = Counter()
    began = time.perf_counter()
    new, waiting = waiting[:4], waiting[4:]
    while new or sampler._sampled:
        at = dict(sampler._sampled)
        finished = sampler.advance(new, SamplingConfig())
        for number, _ in finished:
            done["slow" if (at | sampler._sampled).get(number, 0) else "fast"] += 1
        new, waiting = waiting[: len(finished)], waiting[len(finished) :]
    took = time.perf_counter() - began
    group.kill()
    return done, took


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 40, "num_gpus": 8, "object_store_memory": 100 << 20}
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    made = [cluster.add_node(**node) for _ in range(given.nodes)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        names = [one.node_id for one in made]
        print("| case | workers | GPUs, by node |\n|---|---|---|")
        for case in CASES:
            print("\n".join(rows(case, names)), flush=True)
        cluster.remove_node(made[0])
        back = cluster.add_node(**node)
        print("after node a was lost, with e in its place:\n" + "\n".join(rows("colocated", [*names, back.node_id])))
        done, took = shares(0.02, 200)
        print(f"two engines, one 10 times slower: {done['fast']} and {done['slow']} of 200 requests in {took:.2f} s")
    finally:
        ray.shutdown()
        cluster.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
