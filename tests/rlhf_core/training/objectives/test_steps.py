"""The objective of process reward models, against plain transformers and a loop of our own."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import sequence_scores, step_scores
from rlhf_core.models.loading import load_model
from rlhf_core.training.batching import reduce
from rlhf_core.training.objectives.base import StepObjective
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import StepSample, TokenSample
from tests.rlhf_core.training.conftest import TINY
from tests.support.tolerances import near, of_model

SAMPLES = [
    StepSample((5, 9, 30, 41, 7), (0, 0, 1, 0, 1), (0.0, 0.0, 1.0, 0.0, 0.0)),
    StepSample((6, 9, 30), (0, 0, 1), (0.0, 0.0, 0.3)),
    StepSample((8, 9, 60, 44, 7, 12, 90), (0, 1, 1, 0, 0, 0, 1), (0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)),
]


def unlabelled(sample: StepSample) -> TokenSample:
    return TokenSample(sample.token_ids, sample.loss_mask)


def prefixes(sample: StepSample) -> list[tuple[int, ...]]:
    return [sample.token_ids[: place + 1] for place, mask in enumerate(sample.loss_mask) if mask]


def trainer_of(spec: ModelSpec, *, rows: int = 2) -> LocalTrainer:
    return LocalTrainer(spec, OptimizerConfig(), TrainerConfig(engine="torch", micro_batch=rows))


def test_a_step_is_scored_as_the_sequence_that_ends_there(score_spec: ModelSpec) -> None:
    trainer = trainer_of(score_spec)
    found = trainer.step_scores([unlabelled(sample) for sample in SAMPLES])
    for sample, scores in zip(SAMPLES, found, strict=True):
        assert scores == near(tuple(trainer.scores(prefixes(sample))), of_model(TINY))
    assert [len(scores) for scores in found] == [2, 1, 3]


def test_padding_and_packing_change_no_step_score(score_spec: ModelSpec) -> None:
    model = load_model(score_spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    batches = [collate(SAMPLES, pad_id=0), collate(SAMPLES, pad_id=0, pack_to=16)]
    assert batches[1].packed
    with torch.no_grad():
        padded, packed = (step_scores(model, batch)[batch.loss_mask_BL != 0] for batch in batches)
        alone = [
            sequence_scores(model, collate([TokenSample(ids, (0,) * len(ids))], pad_id=0))
            for ids in prefixes(SAMPLES[2])
        ]
    torch.testing.assert_close(padded, packed, atol=of_model(TINY), rtol=0)
    torch.testing.assert_close(padded[-3:], torch.cat(alone), atol=of_model(TINY), rtol=0)


def test_the_loss_is_the_mean_cross_entropy_over_the_steps_of_all_micro_batches(score_spec: ModelSpec) -> None:
    trainer = trainer_of(score_spec)
    metrics = trainer.loss(SAMPLES, StepObjective())
    logits = [score for scores in trainer.step_scores([unlabelled(sample) for sample in SAMPLES]) for score in scores]
    labels = [1.0, 0.0, 0.3, 1.0, 1.0, 0.0]
    p = [1 / (1 + math.exp(-logit)) for logit in logits]
    terms = [-y * math.log(x) - (1 - y) * math.log(1 - x) for x, y in zip(p, labels, strict=True)]
    assert metrics["loss"] == pytest.approx(sum(terms) / 6, abs=1e-6)
    assert metrics["positive_fraction"] == pytest.approx(3 / 6)


def test_micro_batches_and_ranks_do_not_change_the_gradient(score_spec: ModelSpec) -> None:
    objective, whole = StepObjective(), trainer_of(score_spec, rows=8)
    expected = whole.forward_backward(SAMPLES, objective) | whole.optim_step(learning_rate=0.0)
    pieces = trainer_of(score_spec, rows=1)
    counts = objective.denominators(SAMPLES)
    assert counts == {"steps": 6.0}
    parts = [pieces.forward_backward(SAMPLES[rank::2], objective, counts) for rank in range(2)]
    found = reduce(parts) | pieces.optim_step(learning_rate=0.0)
    assert found == pytest.approx(expected, rel=1e-5)


def test_it_learns(score_spec: ModelSpec) -> None:
    trainer = trainer_of(score_spec)
    before = trainer.loss(SAMPLES, StepObjective())["loss"]
    for _ in range(40):
        trainer.forward_backward(SAMPLES, StepObjective())
        trainer.optim_step(learning_rate=3e-3)
    after = trainer.loss(SAMPLES, StepObjective())
    floor = -(0.3 * math.log(0.3) + 0.7 * math.log(0.7)) / 6  # the soft label's own entropy
    assert floor < after["loss"] < before / 2
    assert after["accuracy"] == pytest.approx(1.0)
