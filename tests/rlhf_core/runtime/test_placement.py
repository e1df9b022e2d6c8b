from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlhf_core.config.engines import HFSamplerConfig, RuntimeConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.runtime.cluster import connect
from rlhf_core.runtime.placement import engine_count, reserve


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray that counts no GPU."""
    import ray

    owned = connect(2)
    yield
    if owned:
        ray.shutdown()


def test_on_cpus_nothing_is_reserved_so_that_all_workers_fit_one_machine() -> None:
    placement = reserve(RuntimeConfig(train_workers=2, sampler=VllmSamplerConfig(engines=3)))
    assert placement.train == ({"num_cpus": 0, "num_gpus": 0},) * 2
    assert placement.sample == ({"num_cpus": 0, "num_gpus": 0},) * 3
    assert placement.group is None


def test_the_transformers_sampler_is_one_process() -> None:
    assert (engine_count(HFSamplerConfig()), engine_count(VllmSamplerConfig(engines=4))) == (1, 4)


@pytest.mark.engine
def test_gpus_that_the_cluster_lacks_are_counted_before_anything_starts(cluster: None) -> None:
    config = RuntimeConfig(train_workers=3000, gpus_per_train_worker=1, gpus_per_engine=0.5)
    with pytest.raises(ConfigError, match=r"3000\.5 GPUs are needed"):
        reserve(config)


@pytest.mark.engine
def test_an_engine_needs_a_gpu_for_each_of_its_parallel_ranks(cluster: None) -> None:
    config = RuntimeConfig(gpus_per_engine=1, sampler=VllmSamplerConfig(tensor_parallel=2))
    with pytest.raises(ConfigError, match=r"tensor_parallel = 2: runtime.gpus_per_engine = 1 is less"):
        reserve(config)
