from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_core.config.engines import LoraConfig, OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training.engines.base import TorchEngine, open_engine
from rlhf_core.training.state import LAUNCHER


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


def test_weights_of_4_bits_are_not_partitioned(policy_spec: ModelSpec) -> None:
    spec = replace(policy_spec, lora=LoraConfig(quantise="nf4"))
    with pytest.raises(ConfigError, match=r"lora.quantise = 'nf4': ZeRO 3 cannot partition 4-bit weights"):
        open_engine(spec, OptimizerConfig(), TrainerConfig(zero_stage=3))


def test_kernels_that_do_not_run_here_are_refused_before_the_model_is_read() -> None:
    spec = ModelSpec("folder does not exist", "lm", None, 0)
    with pytest.raises(ConfigError, match="Liger kernels are not available"):
        open_engine(spec, OptimizerConfig(), TrainerConfig(engine="torch", liger=True))
