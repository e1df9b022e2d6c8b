"""The average follows the weights by its formula, is what is exported, and comes back from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.loading import load_model
from rlhf_core.training.engines.base import open_engine
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.training.trainer import LocalTrainer, WeightAverage, average_of
from rlhf_core.types import TokenSample

TORCH = TrainerConfig(engine="torch", micro_batch=4)
AVERAGED = OptimizerConfig(learning_rate=1e-2, schedule="constant", ema_decay=0.5)


def linear(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(value)
    return model


def test_the_average_is_a_geometric_sum_of_the_weights() -> None:
    model = linear(0.0)
    average = WeightAverage(model, decay=0.9)
    for value in (1.0, 2.0):
        model.weight.data.fill_(value)
        average.update(model)
    # 0.9 * (0.9 * 0 + 0.1 * 1) + 0.1 * 2
    assert average.state()["weight"].item() == pytest.approx(0.29)
    with average.in_place(model):
        assert model.weight.item() == pytest.approx(0.29)
    assert model.weight.item() == 2.0


def test_only_rank_0_keeps_one_and_only_if_asked_to() -> None:
    assert average_of(linear(1.0), decay=0.0, rank=0) is None
    assert average_of(linear(1.0), decay=0.9, rank=1) is None
    assert average_of(linear(1.0), decay=0.9, rank=0) is not None


def exported(trainer: LocalTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.export(folder)
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=0)
    return load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu").state_dict()


def train(trainer: LocalTrainer, samples: list[TokenSample], steps: int) -> None:
    for _ in range(steps):
        trainer.forward_backward(samples, SftObjective(pack_to=None))
        trainer.optim_step(learning_rate=1e-2)


def test_the_export_is_the_average_and_the_sampler_gets_the_weights(
    policy_spec: ModelSpec, token_samples: list[TokenSample], tmp_path: Path
) -> None:
    trainer = LocalTrainer(policy_spec, AVERAGED, TORCH)
    before = {name: weight.clone() for name, weight in trainer.weights().payload.items()}
    train(trainer, token_samples, 1)
    after = trainer.weights().payload
    made = exported(trainer, tmp_path / "made")
    name = next(name for name, weight in after.items() if weight.dim() == 2 and not torch.equal(weight, before[name]))
    torch.testing.assert_close(made[name], (before[name] + after[name]) / 2)
    assert trainer.weights().payload[name].equal(after[name])


def test_the_average_goes_on_from_a_checkpoint(
    policy_spec: ModelSpec, token_samples: list[TokenSample], tmp_path: Path
) -> None:
    whole = LocalTrainer(policy_spec, AVERAGED, TORCH)
    train(whole, token_samples, 4)
    first = LocalTrainer(policy_spec, AVERAGED, TORCH)
    train(first, token_samples, 2)
    first.save(tmp_path / "saved")
    second = LocalTrainer(policy_spec, AVERAGED, TORCH)
    second.load(tmp_path / "saved")
    train(second, token_samples, 2)
    expected, resumed = exported(whole, tmp_path / "whole"), exported(second, tmp_path / "resumed")
    assert all(weight.equal(resumed[name]) for name, weight in expected.items())


def test_zero_3_has_no_whole_weights_to_average(policy_spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.ema_decay = 0\.5: under ZeRO 3"):
        open_engine(policy_spec, AVERAGED, TrainerConfig(engine="deepspeed", zero_stage=3))
