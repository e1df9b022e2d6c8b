import pytest

from rlhf_core.config.runtime import PoolConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.runtime.placement import by_node, gpu_order, layout, without_gpus

THREE = VllmSamplerConfig(engines=3)


def test_on_cpus_nothing_is_reserved_so_that_all_workers_fit_one_machine():
    pools = {"judges": PoolConfig(roles=("reference",))}
    config = RuntimeConfig(train_workers=2, sampler=VllmSamplerConfig(engines=3), pools=pools)
    placement = without_gpus(config, {"here": 8}, own="here")
    assert (placement.of(""), placement.of("judges")) == (placement.train, ({"num_cpus": 0, "num_gpus": 0},))
    assert placement.train == ({"num_cpus": 0, "num_gpus": 0},) * 2
    assert placement.sample == ({"num_cpus": 0, "num_gpus": 0},) * 3
    assert placement.group is None


HERE, THERE = "1" * 56, "2" * 56


def test_on_cpus_of_several_nodes_workers_are_where_the_cores_are():
    config = RuntimeConfig(train_workers=3, sampler=VllmSamplerConfig(engines=1))
    placement = without_gpus(config, {HERE: 4, THERE: 8}, own=HERE)
    assert [one["scheduling_strategy"].node_id for one in placement.train] == [HERE, THERE, THERE]
    assert [one["scheduling_strategy"].node_id for one in placement.sample] == [THERE]
    assert all(one["scheduling_strategy"].soft for one in placement.train), (
        "another node takes the worker of a lost one"
    )
    alone = without_gpus(config, {THERE: 8}, own=HERE)  # a head without cores computes nothing
    assert {one["scheduling_strategy"].node_id for one in (*alone.train, *alone.sample)} == {THERE}


WHOLE, PAIR, ALONE = {"CPU": 1, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 1}


@pytest.mark.parametrize(
    ("workers", "train", "engines", "sample", "bundles", "of_train", "of_sample"),
    [
        (2, 0.5, 2, 0.5, [PAIR, PAIR], [0, 1], [0, 1]),
        (1, 0.3, 2, 0.6, [PAIR, WHOLE], [0], [0, 1]),
        (1, 0.4, 1, 0.5, [{"CPU": 2, "GPU": 0.9}], [0], [0]),
        (1, 0.7, 1, 0.3, [PAIR], [0], [0]),  # in floating point 0.7 + 0.3 is 1 and 0.1 + 0.7 is less than 0.8
        (1, 0.1, 1, 0.7, [{"CPU": 2, "GPU": 0.8}], [0], [0]),
        (2, 0.5, 1, 0, [WHOLE, WHOLE, ALONE], [0, 1], [2]),
        (1, 0.5, 1, 0, [{"CPU": 1, "GPU": 0.5}, ALONE], [0], [1]),
        (1, 1, 2, 0.5, [WHOLE, WHOLE, WHOLE], [0], [1, 2]),
        (2, 1, 1, 4, [WHOLE, WHOLE, {"CPU": 1, "GPU": 4}], [0, 1], [2]),
    ],
)
def test_no_two_workers_of_a_kind_are_in_one_bundle_or_on_one_gpu(
    workers, train, engines, sample, bundles, of_train, of_sample
):
    sampler = VllmSamplerConfig(engines=engines, tensor_parallel=int(max(1, sample)))
    config = RuntimeConfig(train_workers=workers, gpus_per_train_worker=train, gpus_per_engine=sample, sampler=sampler)
    made = layout(config)
    assert (list(made.bundles), list(made.train), list(made.sample)) == (bundles, of_train, of_sample)


POOLS = {
    "judges": PoolConfig(workers=2, gpus_per_worker=1, roles=("reference", "reward_model")),
    "critic": PoolConfig(workers=1, gpus_per_worker=0.5, roles=("value_model",)),
}


@pytest.mark.parametrize(
    ("share", "bundles", "pools", "placed"),
    [
        (0.5, [PAIR] * 3 + [WHOLE] * 2 + [{"CPU": 1, "GPU": 0.5}], {"judges": (3, 4), "critic": (5,)}, (0, 2, 1)),
        (1, [WHOLE] * 8 + [{"CPU": 1, "GPU": 0.5}], {"judges": (6, 7), "critic": (8,)}, (0, 2, 1)),
    ],
)
def test_a_pool_has_gpus_of_its_own(share, bundles, pools, placed):
    config = RuntimeConfig(
        train_workers=3, gpus_per_train_worker=share, gpus_per_engine=share, sampler=THREE, pools=POOLS
    )
    made = layout(config)
    assert (list(made.bundles), made.pools) == (bundles, pools)
    by = by_node(made, {at: "ab"[at % 2] for at in range(len(bundles))})
    assert (by.train, {name: tuple(sorted(each)) for name, each in by.pools.items()}) == (placed, pools)


def test_workers_of_pools_are_interchangeable_with_all_others_of_their_size():
    pools = {"judges": POOLS["judges"]}
    made = layout(
        RuntimeConfig(train_workers=2, gpus_per_train_worker=1, gpus_per_engine=1, sampler=THREE, pools=pools)
    )
    placed = by_node(made, {at: "abcab"[at % 5] for at in range(7)})
    assert (placed.train, placed.sample, placed.pools) == ((0, 3), (5, 1, 4), {"judges": (6, 2)})


def test_ranks_are_neighbours_where_their_bundles_are():
    nodes = {0: "a", 1: "b", 2: "a", 3: "b", 4: "b", 5: "c"}
    pairs = layout(RuntimeConfig(train_workers=6, gpus_per_train_worker=0.5, gpus_per_engine=0.5))
    assert by_node(pairs, nodes).train == (0, 1, 3, 4, 2, 5)  # the pair first, then the node with most
    apart = layout(RuntimeConfig(train_workers=3, gpus_per_train_worker=1, gpus_per_engine=1, sampler=THREE))
    placed = by_node(apart, nodes)
    assert (placed.train, placed.sample) == ((1, 3, 4), (0, 2, 5))
    wide = layout(RuntimeConfig(train_workers=3, gpus_per_train_worker=1, gpus_per_engine=2, sampler=THREE))
    placed = by_node(wide, nodes)
    assert (placed.train, placed.sample) == ((0, 2, 1), (3, 4, 5))  # an engine of two GPUs is no place for a rank


def test_engines_of_two_gpus_have_a_bundle_with_the_ranks_that_they_share_them_with():
    sampler = VllmSamplerConfig(engines=2, tensor_parallel=2)
    made = layout(RuntimeConfig(train_workers=4, gpus_per_train_worker=0.5, gpus_per_engine=0.5, sampler=sampler))
    assert list(made.bundles) == [{"CPU": 3, "GPU": 2}] * 2
    assert (made.train, made.sample) == ((0, 0, 1, 1), (0, 1))
    assert by_node(made, {0: "b", 1: "a"}).train == (1, 1, 0, 0)


def test_workers_are_ordered_by_node_as_they_come_and_then_by_gpu():
    assert gpu_order([["b:7"], ["b:10"], ["a:1"], ["b:2"], ["a:0"]]) == [3, 0, 1, 4, 2]
