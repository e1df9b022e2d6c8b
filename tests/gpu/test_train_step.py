"""One optimizer step on the GPU is the CPU's, and the loss falls."""

from pathlib import Path

import pytest

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import TokenSample

SAMPLES = [TokenSample(tuple(range(10, 30 + i)), (0,) * 4 + (1,) * (16 + i)) for i in range(6)]


def losses(gpus: float, policy: Path, trainer: TrainerConfig) -> list[float]:
    config = RuntimeConfig(gpus_per_train_worker=gpus, trainer=trainer, sampler=VllmSamplerConfig(max_model_len=96))
    runtime = RayRuntime(config)
    try:
        with runtime.trainer("policy", ModelSpec(str(policy), "lm", None, 0), OptimizerConfig()) as handle:
            values = []
            for _ in range(5):
                values.append(handle.forward_backward(SAMPLES, SftObjective(pack_to=None))["loss"])
                handle.optim_step(learning_rate=1e-3)
            return values
    finally:
        runtime.close()


@pytest.mark.parametrize("engine", ["torch", "deepspeed"])
def test_training_on_a_gpu_follows_the_cpu(engine, policy):
    config = TrainerConfig(engine=engine)
    on_gpu, on_cpu = losses(1, policy, config), losses(0, policy, TrainerConfig(engine="torch"))
    assert on_gpu == pytest.approx(on_cpu, rel=5e-3)  # fp32 on both; TF32 stays off
    assert on_gpu[4] < on_gpu[0] - 0.1


def test_bfloat16_training_stays_near_float32(policy):
    bf16 = losses(1, policy, TrainerConfig(engine="deepspeed", dtype="bfloat16"))
    fp32 = losses(1, policy, TrainerConfig(engine="torch"))
    assert bf16 == pytest.approx(fp32, rel=3e-2)  # 8 bits of mantissa
