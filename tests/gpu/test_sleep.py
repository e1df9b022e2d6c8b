"""A trainer gives its memory back while an engine samples, and at its end. An engine: `sleep` of test_steps.py."""

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.runtime.ray_runtime import RayRuntime
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import TokenSample
from tests.gpu.conftest import SMALL, TEXTS

SAMPLES = [TokenSample(tuple(range(10, 40)), (0,) * 4 + (1,) * 26)]


@pytest.mark.parametrize(("engine", "zero"), [("torch", 0), ("deepspeed", 0), ("deepspeed", 1), ("deepspeed", 3)])
def test_the_memory_of_a_trainer_is_free_while_an_engine_samples(engine, zero, tmp_path):
    shape = SMALL.model_copy(update={"hidden_size": 1024, "intermediate_size": 4096, "layers": 4})
    train_tokenizer(TEXTS, vocab_size=320, folder=tmp_path)
    initialize_llama(shape, tmp_path, seed=7)
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    histories = []
    for sleep in (False, True):
        trainer = TrainerConfig.model_validate({"engine": engine, "zero_stage": zero, "sleep": sleep})
        config = RuntimeConfig(
            gpus_per_train_worker=0.5, gpus_per_engine=0.5, trainer=trainer, sampler=VllmSamplerConfig(max_model_len=96)
        )
        runtime = RayRuntime(config)
        try:
            with runtime.trainer("policy", ModelSpec(str(tmp_path), "lm", None, 0), OptimizerConfig()) as handle:
                losses = []
                for _ in range(3):
                    losses.append(handle.forward_backward(SAMPLES, SftObjective(pack_to=None))["loss"])
                    handle.optim_step(learning_rate=1e-3)
                    awake, _ = torch.cuda.mem_get_info()
                    with runtime._sharing.sampling():
                        asleep, _ = torch.cuda.mem_get_info()
                    if sleep:  # the weights and two moments, at least
                        assert asleep - awake > 2.5 * weights
                histories.append(losses)
        finally:
            runtime.close()
    assert histories[1] == pytest.approx(histories[0], rel=1e-5)  # some kernels add in any order


def test_a_model_that_is_released_leaves_no_memory_behind(policy):
    config = RuntimeConfig(gpus_per_train_worker=1, trainer=TrainerConfig(engine="torch"))
    runtime = RayRuntime(config)
    try:
        runtime._train_workers().call("test", "rest", False)
        left = []
        for _ in range(3):
            with runtime.trainer("policy", ModelSpec(str(policy), "lm", None, 0), OptimizerConfig()) as handle:
                handle.forward_backward(SAMPLES * 64, SftObjective(pack_to=None))
                handle.optim_step(learning_rate=1e-3)
            left.append(torch.cuda.mem_get_info()[0])
        assert max(left) - min(left) < 64 << 20
    finally:
        runtime.close()
