"""A student beside its teachers: a step in pieces is the step in one."""

import math
from pathlib import Path

import numpy as np
import pytest

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.data.alignment import AlignedSample, aligned_examples
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.training import distillation_trainer
from rlhf_core.training.distillation_trainer import DistillationTrainer
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.training.objectives.cross_tokenizer import CrossTokenizerObjective
from rlhf_core.training.objectives.distillation import DistillationObjective, OtherVocabularies, SameVocabulary
from rlhf_core.training.trainer import LocalTrainer
from rlhf_core.types import Message, TokenSample
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
def test_a_step_in_pieces_is_the_step_in_one(policy_spec, optimizer, token_samples, k, monkeypatch):
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
    policy_spec, optimizer, token_samples, monkeypatch
):
    trainer = distillation_trainer_of(policy_spec, optimizer, 4)
    monkeypatch.setattr(distillation_trainer, "PIECE_ELEMENTS", 18 * 4)
    # masked tokens 3 15 7 10 6 19 15 4 12 9: as many as fit into 18, and the 19 alone
    lengths = [[sum(one.loss_mask) for one in piece] for piece in trainer._pieces(token_samples)]
    assert lengths == [[3, 15], [7, 10], [6], [19], [15], [4, 12], [9]]


def test_a_trainer_says_of_each_sample_what_it_says_of_it_alone(policy_spec, token_samples):
    trainer = LocalTrainer(policy_spec, None, TORCH)
    together = trainer.top_logprobs(token_samples, k=1, temperature=1.0)
    for sample, top in zip(token_samples, together, strict=True):
        (alone,) = trainer.top_logprobs([sample], k=1, temperature=1.0)
        assert top.ids.tolist() == alone.ids.tolist()
        assert top.logprobs == pytest.approx(alone.logprobs, abs=of_model(TINY) * math.log(TINY.vocab_size))
    assert trainer.top_logprobs([], k=1, temperature=1.0) == []


@pytest.fixture
def trainers(policy_spec: ModelSpec, optimizer: OptimizerConfig) -> list[LocalTrainer]:
    """A student, and the same model after one step and after three."""
    made = [LocalTrainer(policy_spec, optimizer, TORCH) for _ in range(3)]
    for steps, trainer in zip((0, 1, 3), made, strict=True):
        for _ in range(steps):
            trainer.forward_backward([TokenSample((1, 2, 3), (0, 1, 1))], SftObjective(pack_to=None))
            trainer.optim_step(learning_rate=0.1)
    return made


def test_each_sample_has_what_every_teacher_says_in_the_order_of_the_teachers(trainers, token_samples):
    teachers = SameVocabulary((trainers[1], trainers[2]), 4, 1.0, 320)
    both = teachers.taught(token_samples)
    for number, trainer in enumerate(trainers[1:]):
        alone = trainer.top_logprobs(token_samples, k=4, temperature=1.0)
        for sample, top in zip(both, alone, strict=True):
            np.testing.assert_array_equal(sample.teachers[number].logprobs, top.logprobs)
            np.testing.assert_array_equal(sample.teachers[number].token_logprobs, top.token_logprobs)
    assert not np.array_equal(both[0].teachers[0].logprobs, both[0].teachers[1].logprobs)
    assert teachers.elements(token_samples[0]) == 3 * 4 * 2
    assert SameVocabulary((trainers[1],), 0, 1.0, 320).elements(token_samples[0]) == 3 * 320


def test_teachers_with_other_tokenizers_say_what_they_say_of_each_sample_alone(trainers, policy_spec, tmp_path):
    train_tokenizer(["Hello reader, what is it? It is a colour."] * 5, vocab_size=400, folder=tmp_path)
    initialize_llama(TINY.model_copy(update={"vocab_size": 400}), tmp_path, seed=5)
    other = LocalTrainer(ModelSpec(str(tmp_path), "lm", None, 3), None, TORCH)
    student, chat = ChatTemplate.load(Path(policy_spec.path)), ChatTemplate.load(tmp_path)
    talks = [
        (Message("user", f"What is {n}?"), Message("assistant", "Blue is a colour. " * (1 + n % 3))) for n in range(5)
    ]
    samples = [one for talk in talks for one in aligned_examples(student, [chat, student], talk, max_length=60)]
    teachers = OtherVocabularies((other, trainers[1]), 4, 1.0, (400, 320))
    together = teachers.taught(samples)
    for sample, told in zip(samples, together, strict=True):
        assert (told.token_ids, told.loss_mask) == (sample.token_ids, sample.loss_mask)
        (alone,) = teachers.taught([sample])
        for one, two in zip(told.teachers, alone.teachers, strict=True):
            assert one.spans == two.spans and len(one.spans) == len(one.text_logprobs) == len(one.others)
            np.testing.assert_allclose(one.others, two.others, atol=of_model(TINY))
            np.testing.assert_allclose(one.text_logprobs, two.text_logprobs, rtol=of_model(TINY))
    first: AlignedSample = samples[0]
    widths = [sum(one.sample.loss_mask) for one in first.teachers]
    assert teachers.elements(first) == 5 * sum(widths)
    whole = OtherVocabularies((other, trainers[1]), 0, 1.0, (400, 320))
    held = [one.others.size for one in whole.taught([first])[0].teachers]  # a group has up to size - 1 outcomes a token
    padded = [size // (vocabulary - 1) for size, vocabulary in zip(held, (400, 320), strict=True)]
    assert padded[0] > widths[0]  # groups of several tokens, padded to the widest
    assert whole.elements(first) == 400 * padded[0] + 320 * max(widths[1], padded[1])

    objective = CrossTokenizerObjective("uld_text", 1.0, 0.5, 4, (("other", 0.5), ("own", 0.5)))
    trainer = DistillationTrainer(trainers[0], teachers)
    before = trainer.loss(samples, objective)
    assert trainer.forward_backward(samples, objective)["loss"] == near(before["loss"], of_model(TINY))
