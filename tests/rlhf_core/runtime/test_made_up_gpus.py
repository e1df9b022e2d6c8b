"""GPUs that Ray counts and nobody has: a head and two nodes of two each, in this process's own little cluster.

Ray hands them out as it does real ones, so who gets which is tested here; what computes on them is in `tests/gpu`.
"""

import logging
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.runtime import PoolConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError, WorkerLostError
from rlhf_core.runtime import placement
from rlhf_core.runtime.cluster import SEE_NO_GPU, worker_environment
from rlhf_core.runtime.connection import keep_token_private
from rlhf_core.runtime.placement import Placement, reserve
from rlhf_core.runtime.weight_sync import choose_transfer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,  # the first of them starts what all share
    pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU would be taken for a made-up one"),
]
NODES, GPUS = 2, 2
NODE = {"num_cpus": 8, "num_gpus": GPUS, "object_store_memory": 100 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    keep_token_private()  # makes the token if there is none
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    try:
        for _ in range(NODES):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class Places:
    """The GPUs of the workers of a `Placement`, as `node:index`.

    Tasks find them out: their processes serve the next test, and those of actors would not (1.3 CPU seconds each).
    """

    def __init__(self, reserved: Placement) -> None:
        import ray

        pooled = [options for pool in reserved.pools.values() for options in pool]
        places = (*reserved.train, *reserved.sample, *pooled)
        workers = len(places)

        @ray.remote(max_calls=0, max_retries=0)  # a local function: its process need not import this module
        def own_gpus(meeting: str) -> list[str]:
            """Found out when all workers have theirs, and so hold them at the same time."""
            context = ray.get_runtime_context()
            Path(meeting, context.get_task_id()).touch()
            while len(list(Path(meeting).iterdir())) < workers:
                time.sleep(0.01)
            return [f"{context.get_node_id()}:{gpu}" for gpu in context.get_accelerator_ids()["GPU"]]

        with tempfile.TemporaryDirectory() as meeting:
            try:
                gpus = ray.get([own_gpus.options(**one).remote(meeting) for one in places], timeout=400)
            finally:
                ray.util.remove_placement_group(reserved.group)
        first, last = len(reserved.train), len(reserved.train) + len(reserved.sample)
        self.train, self.sample, self.pooled = gpus[:first], gpus[first:last], gpus[last:]

    @property
    def nodes(self) -> list[str]:
        return [gpus[0].partition(":")[0] for gpus in self.train]


def config_of(workers: int, train: float, engines: int, sample: float, **more: Any) -> RuntimeConfig:
    return RuntimeConfig(
        train_workers=workers,
        gpus_per_train_worker=train,
        gpus_per_engine=sample,
        sampler=VllmSamplerConfig(engines=engines),
        trainer=TrainerConfig(engine="torch"),
        **more,
    )


def test_halves_of_gpus_put_a_rank_and_an_engine_on_each_gpu_and_never_two_ranks(cluster):
    places = Places(reserve(config_of(4, 0.5, 4, 0.5)))
    assert len({gpus[0] for gpus in places.train}) == 4
    assert sorted(places.train) == sorted(places.sample)
    assert places.nodes == sorted(
        places.nodes, key=places.nodes.index
    )  # the ranks of one node, then those of the other
    assert places.nodes[:2] == [places.nodes[0]] * 2


def test_engines_of_two_gpus_share_them_with_the_ranks_of_their_node(cluster):
    sampler = VllmSamplerConfig(engines=2, tensor_parallel=2)
    config = config_of(4, 0.5, 2, 0.5).model_copy(update={"sampler": sampler})
    made = reserve(config)
    places = Places(made)
    assert len({gpus[0] for gpus in places.train}) == 4, "each rank has a GPU"
    assert places.sample == [[], []], "and Ray gives the engines none"
    lent = made.lent(places.train, parallel=2)
    assert sorted(gpu for gpus in lent for gpu in gpus) == sorted(gpus[0] for gpus in places.train)
    nodes = [{gpu.partition(":")[0] for gpu in gpus} for gpus in lent]
    assert nodes == [{made.nodes[0]}, {made.nodes[1]}] or nodes == [{made.nodes[1]}, {made.nodes[0]}]
    assert choose_transfer([gpus[0] for gpus in places.train], lent) == "ipc", "from each rank to its own GPU"
    one = reserve(config.model_copy(update={"train_workers": 2, "sampler": VllmSamplerConfig(tensor_parallel=2)}))
    alone = Places(one)
    assert sorted(one.lent(alone.train, parallel=2)[0]) == sorted(gpus[0] for gpus in alone.train)


def test_a_rank_and_an_engine_alone_share_one_gpu_and_leave_its_rest_to_others(cluster):
    places = Places(reserve(config_of(1, 0.4, 1, 0.4)))
    assert places.train == places.sample


def test_whole_gpus_are_dealt_out_node_by_node(cluster):
    places = Places(reserve(config_of(2, 1, 2, 1)))
    assert len({gpus[0] for gpus in places.train + places.sample}) == 4
    assert len(set(places.nodes)) == 1  # all ranks on one node, all engines on the other


def test_workers_share_the_cores_of_their_node_with_those_there_that_compute_at_once(cluster):
    import ray

    # Two nodes of 8 cores and 2 GPUs: ranks fill one, and the third is beside the engine.
    made = reserve(config_of(3, 1, 1, 1))
    try:
        assert made.cores_each(made.train, made.train) == [4, 4, 8]
        assert made.cores_each(made.sample, made.sample) == [8]
        assert made.cores_each(made.train[2:], made.train + made.sample) == [4]
    finally:
        ray.util.remove_placement_group(made.group)


def test_workers_without_gpus_use_the_cores_of_all_nodes(cluster):
    """Of 8, 8 and 1: three train workers and a judge are 2 on each large node, and an engine has the cores of one."""
    import ray

    judges = PoolConfig(workers=1, roles=("reference",))
    made = reserve(config_of(3, 0, 1, 0, pools={"judges": judges}))
    together = (*made.train, *made.pools["judges"])
    assert made.cores_each(made.train, together) + made.cores_each(made.pools["judges"], together) == [4] * 4
    assert made.cores_each(made.sample, made.sample) == [8]

    @ray.remote
    def node() -> str:
        return ray.get_runtime_context().get_node_id()

    found = ray.get([node.options(**one).remote() for one in together], timeout=400)
    assert found == [one["scheduling_strategy"].node_id for one in together]
    assert found[0] == found[1] != found[2] == found[3]


def test_a_worker_without_gpus_sees_none_on_a_node_that_has_some(cluster):
    """On a Ray that others started, whose nodes have no such setting (0 stands for it here)."""
    import ray

    @ray.remote(num_cpus=2)  # the head has one
    def visible() -> str | None:
        import os

        return os.environ.get("CUDA_VISIBLE_DEVICES")

    ours = worker_environment(threads=1)
    found = [
        ray.get(visible.options(runtime_env={"env_vars": ours | change}).remote(), timeout=400)
        for change in ({SEE_NO_GPU: "0"}, {})
    ]
    assert found == [None, ""]


# ---------------------------------------------------------------- GPUs that are not there yet


def test_a_node_that_comes_later_is_waited_for_and_what_is_missing_is_logged(cluster, caplog, monkeypatch):
    monkeypatch.setattr(placement, "LOG_EVERY_S", 1.0)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(reserve, config_of(5, 1, 1, 0, placement_timeout_s=120))
        time.sleep(4)
        assert not waiting.done()
        assert "5 x {CPU 1, GPU 1}" in caplog.text and "4 GPUs" in caplog.text
        node = cluster.add_node(**NODE | {"num_gpus": 1})
        try:
            places = Places(waiting.result())
        finally:
            cluster.remove_node(node)
    assert len({gpus[0] for gpus in places.train}) == 5


def test_a_cluster_that_does_not_grow_is_an_error_that_names_what_is_missing(cluster):
    """And what waited is what an autoscaler looks at: a placement group that is pending."""
    import ray

    pending: list[Any] = []

    def look() -> str:
        groups = ray.util.placement_group_table().values()
        pending.extend(list(one["bundles"].values()) for one in groups if one["state"] == "PENDING")
        return ""

    with pytest.raises(
        ConfigError, match=r"not all of this became available within runtime\.placement_timeout_s = 2 s"
    ) as failure:
        reserve(config_of(5, 1, 1, 0, placement_timeout_s=2), over=look)
    said = str(failure.value)
    assert "5 GPUs and " in said and "CPUs are needed" in said and "the cluster has 4 GPUs" in said
    assert sum(bundle.get("GPU", 0) for bundle in pending[0]) == 5
    assert _reserved() == []  # or it would take the GPUs from the next attempt


def test_a_reservation_that_nobody_wants_any_more_is_given_up(cluster):
    with pytest.raises(WorkerLostError, match="stopped waiting: the runtime is being closed"):
        reserve(config_of(5, 1, 1, 0, placement_timeout_s=60), over=lambda: "the runtime is being closed")
    assert _reserved() == []


def _reserved() -> list[str]:
    import ray

    return [one["state"] for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
