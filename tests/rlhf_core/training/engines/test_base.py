"""The plain engine, and the engine that each model gets."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training.engines.base import TorchEngine, open_engine
from rlhf_core.training.state import LAUNCHER

OPTIMIZER = OptimizerConfig(max_grad_norm=100.0)


def engine_of(weight: float, *, compute_dtype: torch.dtype = torch.float32, trained: bool = True) -> TorchEngine:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(weight)
    optimizer = OPTIMIZER if trained else None
    return TorchEngine(module, optimizer, device=torch.device("cpu"), rank=0, compute_dtype=compute_dtype)


def output(engine: TorchEngine, x: float) -> torch.Tensor:
    return engine.forward(lambda module: module(torch.tensor([[x]])).sum())


def test_gradients_add_up_until_the_step_which_clears_them():
    engine = engine_of(1.0)
    engine.backward(output(engine, 3.0))
    engine.backward(output(engine, 4.0))
    assert engine.step(0.1) == 7.0
    # the first Adam step is the learning rate against the gradient's sign
    assert float(engine.module.weight.detach()) == pytest.approx(0.9)
    assert engine.module.weight.grad is None


def test_the_learning_rate_of_a_step_is_the_one_it_is_given():
    engine = engine_of(1.0)
    for rate in (0.1, 0.0, 0.2):
        engine.backward(output(engine, 3.0))
        engine.step(rate)
    # equal gradients: every Adam step is its rate
    assert float(engine.module.weight.detach()) == pytest.approx(0.7, abs=1e-5)


def test_a_skipped_step_reports_an_infinite_norm_and_clears_the_gradient():
    engine = engine_of(1.0)
    engine.backward(output(engine, math.nan))
    assert engine.step(0.1) == math.inf
    assert float(engine.module.weight.detach()) == 1.0
    engine.backward(output(engine, 2.0))
    assert engine.step(0.1) == 2.0


def test_bfloat16_is_for_computing_alone():
    # 1 + 2^-10 is not a bfloat16: the product is rounded, the weight is not
    engine = engine_of(1 + 2**-10, compute_dtype=torch.bfloat16)
    assert output(engine, 1.0).item() == 1.0
    assert engine.module.weight.item() == 1 + 2**-10


def test_a_frozen_model_needs_nothing_of_deepspeed_below_stage_3(policy_spec):
    engine = open_engine(policy_spec, None, TrainerConfig(engine="deepspeed", zero_stage=1, dtype="bfloat16"))
    assert isinstance(engine, TorchEngine)
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())


def test_the_plain_engine_refuses_to_train_on_several_ranks(policy_spec, monkeypatch):
    for name, value in zip(LAUNCHER, ("0", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="trains in one process, but there are 2 train workers"):
        open_engine(policy_spec, OptimizerConfig(), TrainerConfig(engine="torch"))


def test_only_a_trained_model_checkpoints_its_activations(policy_spec):
    config = TrainerConfig(engine="torch", gradient_checkpointing=True)
    assert open_engine(policy_spec, OptimizerConfig(), config).module.is_gradient_checkpointing
    assert not open_engine(policy_spec, None, config).module.is_gradient_checkpointing


@pytest.mark.parametrize(
    ("lora", "trainer", "message"),
    [
        ({"quantize": "nf4"}, {"zero_stage": 3}, "lora.quantize = 'nf4': ZeRO 3 cannot partition 4-bit weights"),
        (
            {"target_parameters": ("a.b",)},
            {"liger": True},
            r"lora.target_parameters = \('a.b',\): Liger computes experts",
        ),
    ],
)
def test_adapters_that_the_trainer_cannot_train_are_refused(policy_spec, lora, trainer, message):
    spec = replace(policy_spec, lora=LoraConfig(**lora))
    with pytest.raises(ConfigError, match=message):
        open_engine(spec, OptimizerConfig(), TrainerConfig(**trainer))


def test_kernels_that_do_not_run_here_are_refused_before_the_model_is_read():
    spec = ModelSpec("folder does not exist", "lm", None, 0)
    with pytest.raises(ConfigError, match="Liger kernels are not available"):
        open_engine(spec, OptimizerConfig(), TrainerConfig(engine="torch", liger=True))
