"""A student beside its teacher: a step in pieces is the step in one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.training import distillation_trainer
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.training.objectives.distillation import DistillationObjective, SameVocabulary
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import TokenSample
from tests.rlhf_core.training.conftest import TINY
from tests.support.tolerances import near, of_model

OBJECTIVE = DistillationObjective(kind="jsd", jsd_beta=0.3, temperature=1.0, kl_weight=0.5)
TORCH = TrainerConfig(engine="torch", micro_batch=3)


def distillation_trainer_of(spec: ModelSpec, optimizer: OptimizerConfig, k: int) -> DistillationTrainer:
    """A student beside a copy of itself after one step."""
    student, teacher = LocalTrainer(spec, optimizer, TORCH), LocalTrainer(spec, optimizer, TORCH)
    teacher.forward_backward([TokenSample((1, 2, 3), (0, 1, 1))], SftObjective(pack_to=None))
    teacher.optim_step(learning_rate=0.1)
    return DistillationTrainer(student, SameVocabulary((teacher,), k, 1.0, 320))


@pytest.mark.parametrize("k", [0, 8])
def test_a_step_in_pieces_is_the_step_in_one(
    policy_spec: ModelSpec,
    optimizer: OptimizerConfig,
    token_samples: list[TokenSample],
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for elements in (2**25, 20 * (k or 320)):  # all at once, or 20 tokens
        monkeypatch.setattr(distillation_trainer, "PIECE_ELEMENTS", elements)
        trainer = distillation_trainer_of(policy_spec, optimizer, k)
        metrics = trainer.loss(token_samples, OBJECTIVE)
        metrics |= {
            f"train/{name}": value for name, value in trainer.forward_backward(token_samples, OBJECTIVE).items()
        }
        made.append(metrics | trainer.optim_step(learning_rate=1e-3))
    assert made[0]["loss"] == made[0]["train/loss"] > 0
    assert made[1] == near(made[0], of_model(TINY))


def test_pieces_hold_no_more_than_their_limit_unless_they_are_one_sample(
    policy_spec: ModelSpec,
    optimizer: OptimizerConfig,
    token_samples: list[TokenSample],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = distillation_trainer_of(policy_spec, optimizer, 4)
    monkeypatch.setattr(distillation_trainer, "PIECE_ELEMENTS", 18 * 4)
    # masked tokens 3 15 7 10 6 19 15 4 12 9: as many as fit into 18, and the 19 alone
    lengths = [[sum(one.loss_mask) for one in piece] for piece in trainer._pieces(token_samples)]
    assert lengths == [[3, 15], [7, 10], [6], [19], [15], [4, 12], [9]]


def test_the_teacher_stays_as_it_is(
    policy_spec: ModelSpec, optimizer: OptimizerConfig, token_samples: list[TokenSample]
) -> None:
    trainer = distillation_trainer_of(policy_spec, optimizer, 4)
    (teacher,) = trainer._teachers.trainers
    before = teacher.weights().digest
    for _ in range(2):
        trainer.forward_backward(token_samples, replace(OBJECTIVE, kl_weight=1.0))
        trainer.optim_step(learning_rate=1e-3)
    assert teacher.weights().digest == before != trainer.weights().digest


def test_a_trainer_says_of_each_sample_what_it_says_of_it_alone(
    policy_spec: ModelSpec, token_samples: list[TokenSample]
) -> None:
    trainer = LocalTrainer(policy_spec, None, TORCH)
    together = trainer.top_logprobs(token_samples, k=1, temperature=1.0)
    for sample, top in zip(token_samples, together, strict=True):
        (alone,) = trainer.top_logprobs([sample], k=1, temperature=1.0)
        assert top.ids.tolist() == alone.ids.tolist()
        assert top.logprobs == pytest.approx(alone.logprobs, abs=of_model(TINY) * math.log(TINY.vocab_size))
    assert trainer.top_logprobs([], k=1, temperature=1.0) == []
