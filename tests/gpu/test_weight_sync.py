"""Trained weights reach the engine GPU to GPU: by CUDA IPC on one GPU, by NCCL between two."""

from pathlib import Path

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, RuntimeConfig, SamplingConfig, TrainerConfig, VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import SamplingRequest, TokenSample
from tests.gpu.conftest import SMALL, TEXTS

REQUESTS = [SamplingRequest(tuple(range(10, 13 + index % 5)), seed=index) for index in range(16)]
SAMPLES = [TokenSample(tuple(range(10, 40)), (0,) * 4 + (1,) * 26)]


def check_sync(policy: Path, *, gpus: float, engines: int, transfer: str) -> None:
    """Train, send twice, and compare the engine's log-probabilities with the trainer's after each."""
    sampler = VllmSamplerConfig(max_model_len=96, gpu_memory_fraction=0.3, engines=engines)
    config = RuntimeConfig(
        gpus_per_train_worker=gpus, gpus_per_engine=gpus, trainer=TrainerConfig(engine="torch"), sampler=sampler
    )
    runtime = RayRuntime(config)
    spec = ModelSpec(str(policy), "lm", None, 0)
    try:
        assert runtime._transfer() == transfer
        with runtime.trainer("policy", spec, OptimizerConfig()) as trainer, runtime.sampler(policy) as engine:
            for version in (1, 2):
                trainer.forward_backward(SAMPLES, SftObjective(pack_to=None))
                trainer.optim_step(learning_rate=3e-3)
                engine.load_weights(trainer.weights(), version=version)
                completions = engine.generate(REQUESTS, SamplingConfig(max_tokens=16))
                assert {completion.policy_version for completion in completions} == {version}
                pairs = list(zip(REQUESTS, completions, strict=True))
                samples = [
                    TokenSample(
                        request.prompt_ids + completion.token_ids,
                        (0,) * len(request.prompt_ids) + (1,) * len(completion.token_ids),
                    )
                    for request, completion in pairs
                ]
                logprobs = trainer.logprobs(samples, temperature=1.0)
                for (request, completion), row in zip(pairs, logprobs, strict=True):
                    # One step moves the loss by tenths of a nat, so stale weights would be far outside.
                    assert row[len(request.prompt_ids) :] == pytest.approx(completion.logprobs, abs=1e-2)
    finally:
        runtime.close()


def test_a_tensor_larger_than_vllms_own_buffer_goes_by_cuda_ipc(tmp_path):
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("needs a GPU of 40 GiB")
    shape = SMALL.model_copy(update={"vocab_size": 300_000, "hidden_size": 1024})  # an embedding of 1.2 GB in float32
    train_tokenizer(TEXTS, vocab_size=320, folder=tmp_path)
    initialize_llama(shape, tmp_path, seed=7)
    check_sync(tmp_path, gpus=0.5, engines=1, transfer="ipc")


def test_cuda_ipc_between_a_trainer_and_an_engine_on_one_gpu(policy):
    check_sync(policy, gpus=0.5, engines=1, transfer="ipc")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_between_two_gpus(policy):
    check_sync(policy, gpus=1, engines=1, transfer="nccl")


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")
def test_nccl_to_two_engines(policy):
    check_sync(policy, gpus=1, engines=2, transfer="nccl")
