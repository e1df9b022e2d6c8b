"""The worker as a plain object; on Ray, with vLLM, it is tested by test_ray_runtime."""

import os
import sys
import threading
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.runtime import HFSamplerConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError, SamplingError
from rlhf_core.interfaces import Weights
from rlhf_core.runtime import sample_worker
from rlhf_core.runtime.packed_completions import pack_request, unpack_completions
from rlhf_core.runtime.sample_worker import LOW, SampleWorker, at_low_priority
from rlhf_core.runtime.weight_sync import StoredWeights
from rlhf_core.types import SamplingRequest


def test_a_worker_recovers_from_a_policy_that_cannot_be_opened(policies, tmp_path):
    worker = SampleWorker(HFSamplerConfig(), threads=1)
    worker.open(policies[0], "")
    with pytest.raises(ConfigError, match=r"config\.json"):
        worker.open(tmp_path, "")
    assert set(worker.open(policies[1], "")) == {"torch", "transformers"}
    (completion,) = unpack_completions(
        worker.generate([pack_request(SamplingRequest((10, 11), seed=1))], SamplingConfig(max_tokens=3))
    )
    assert completion.policy_version == 0
    worker.stop()
    worker.stop()  # a second time does nothing


@pytest.mark.engine
def test_a_vllm_for_the_cpu_does_not_sit_on_a_gpu(monkeypatch, policies):
    platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed")
    if platforms.current_platform.device_type != "cpu":
        pytest.skip("this vLLM is built for GPUs")
    worker = SampleWorker(VllmSamplerConfig(), threads=1, gpus_per_engine=0.5)
    monkeypatch.setattr(worker, "_import_engine", lambda: None)  # it is
    monkeypatch.setattr(worker, "gpus", lambda: ["0123456789abcdef:3"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ConfigError, match=r"gpus_per_engine = 0\.5: Ray reserved GPU 01234567:3, but vLLM was built for"
    ):
        worker.open(policies[0], "")


def test_a_sampler_that_cannot_sleep_is_named_where_its_configuration_says_it_sleeps(policies):
    worker = SampleWorker(HFSamplerConfig(), threads=1)
    with pytest.raises(SamplingError, match="no policy was opened on this worker; take a new lease"):
        worker.generate([], SamplingConfig())
    worker.open(policies[0], "")
    with pytest.raises(
        SamplingError, match=r"HFSampler'?: .*sleeps or takes weights on a GPU; give the class the methods"
    ):
        worker.sleep()


class Sleeper:
    """A sampler that can do everything, but refuses the weights of version 3."""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, version: int = 0, **options: Any) -> Any:
            if version == 3:
                raise SamplingError("weights", 3, "broken", "none")
            return [] if name == "generate" else {}

        return call


def test_an_engine_without_weights_samples_after_a_load_a_transfer_or_a_lease_and_never_before(policies, monkeypatch):
    worker, sent = SampleWorker(HFSamplerConfig(), threads=1), Weights(StoredWeights(()), "digest")
    monkeypatch.setattr(sample_worker, "reopen_sampler", lambda *_, **__: Sleeper())
    monkeypatch.setattr(worker, "_on_device", Sleeper)
    monkeypatch.setattr(sample_worker.ray, "get", lambda refs: refs)
    worker.open(policies[0], "")
    for refill in (lambda: worker.load_weights(sent, 2), lambda: worker.adopt(2), lambda: worker.open(policies[0], "")):
        worker.sleep(True)
        worker.generate([], SamplingConfig())
        worker.sleep(False)
        with pytest.raises(SamplingError, match="broken"):
            worker.load_weights(sent, 3)
        worker.sleep(True)  # keeps what is no policy
        for sample in (worker.generate, worker.advance):
            with pytest.raises(SamplingError, match=r"dropped its weights while a model trained.*call load_weights"):
                sample([], SamplingConfig())
        refill()
        worker.generate([], SamplingConfig())


@pytest.mark.skipif(sys.platform != "linux", reason="priorities per thread are Linux's")
def test_the_work_gives_way_and_its_caller_does_not():
    def own() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = own()
    assert at_low_priority(own) == max(LOW, before)
    assert own() == before


def test_an_error_of_the_work_reaches_the_caller():
    with pytest.raises(ImportError, match="no engine"):
        at_low_priority(_fail)


def _fail() -> None:
    raise ImportError("no engine")
