from __future__ import annotations

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training.distributed import LAUNCHER
from rlhf_core.training.engines import open_engine
from rlhf_core.training.torch_engine import TorchEngine


def test_a_frozen_model_needs_nothing_of_deepspeed_below_stage_3(policy_spec: ModelSpec) -> None:
    engine = open_engine(policy_spec, None, TrainerConfig(engine="deepspeed", zero_stage=1, dtype="bfloat16"))
    assert isinstance(engine, TorchEngine)
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in engine.module.parameters())


def test_a_trained_model_keeps_float32_weights_on_the_plain_engine(policy_spec: ModelSpec) -> None:
    engine = open_engine(policy_spec, OptimizerConfig(), TrainerConfig(engine="torch", dtype="bfloat16"))
    assert {parameter.dtype for parameter in engine.module.parameters()} == {torch.float32}


def test_the_plain_engine_refuses_to_train_on_several_ranks(
    policy_spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(LAUNCHER, ("0", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="trains in one process, but there are 2 train workers"):
        open_engine(policy_spec, OptimizerConfig(), TrainerConfig(engine="torch"))


def test_only_a_trained_model_checkpoints_its_activations(policy_spec: ModelSpec) -> None:
    config = TrainerConfig(engine="torch", gradient_checkpointing=True)
    assert open_engine(policy_spec, OptimizerConfig(), config).module.is_gradient_checkpointing
    assert not open_engine(policy_spec, None, config).module.is_gradient_checkpointing
