"""The student's loss across tokenizers is that of both models' own distributions, on 320 and 1,000 tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.config.models import InitModel
from rlhf_core.data.alignment import AlignedSample, CrossTokenizerSample, aligned_examples
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models import forward
from rlhf_core.models.batches import collate
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.models.loading import load_model
from rlhf_core.training.objectives.base import PlacedModel
from rlhf_core.training.objectives.cross_tokenizer import CrossTokenizerObjective, teacher_outcomes
from rlhf_core.training.objectives.distillation import top_logprobs
from rlhf_core.types import Message, TokenSample
from tests.rlhf_core.training.conftest import TINY
from tests.support.tolerances import near, of_model

CPU = torch.device("cpu")
LARGE = InitModel(
    vocab_size=1000, hidden_size=32, layers=1, heads=2, kv_heads=1, intermediate_size=64, max_positions=96
)
TALKS = [
    (Message("user", f"What is {n} + 30?"), Message("assistant", "It is 42. " + "Say hello to the reader! " * (n % 3)))
    for n in range(5)
]
WEIGHTS = (("large", 0.75), ("own", 0.25))
OBJECTIVE = CrossTokenizerObjective("uld_text", temperature=0.7, kl_weight=0.6, k=4, weights=WEIGHTS)


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    train_tokenizer(["Say hello: it is what it is, reader. hello to " * 2] * 5, vocab_size=1000, folder=folder)
    initialize_llama(LARGE, folder, seed=9)
    return folder


def model_of(folder: Path | str) -> nn.Module:
    spec = ModelSpec(path=str(folder), head="lm", lora=None, seed=3)
    return load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")


@pytest.fixture
def models(policy_spec: ModelSpec, large_folder: Path) -> list[nn.Module]:
    """The student, and its two teachers: a large vocabulary, and the student's own at other weights."""
    made = [model_of(policy_spec.path), model_of(large_folder), model_of(policy_spec.path)]
    with torch.no_grad():
        for scale, model in zip((8.0, 12.0, 5.0), made, strict=True):  # distributions that are far from uniform
            any_model: Any = model
            any_model.model.norm.weight.mul_(scale)
    return made


@pytest.fixture
def samples(policy_spec: ModelSpec, large_folder: Path) -> list[AlignedSample]:
    student, large = ChatTemplate.load(Path(policy_spec.path)), ChatTemplate.load(large_folder)
    return [one for talk in TALKS for one in aligned_examples(student, [large, student], talk, max_length=60)]


def taught(models: Sequence[nn.Module], samples: Sequence[AlignedSample], k: int) -> list[CrossTokenizerSample]:
    made = []
    for sample in samples:
        told = []
        for model, teacher in zip(models[1:], sample.teachers, strict=True):
            with torch.no_grad():
                batch = collate([teacher.sample], pad_id=0)
                (top,) = top_logprobs(model, batch, k=k + 1 if k else 0, temperature=OBJECTIVE.temperature)
            told.append(teacher_outcomes(teacher, top, k=k))
        made.append(CrossTokenizerSample(sample.token_ids, sample.loss_mask, tuple(told)))
    return made


def slow_rows(
    model: Any, sample: TokenSample | AlignedSample, temperature: float
) -> tuple[list[list[float]], list[int]]:
    """The probabilities of the model's own forward pass at the masked tokens, and these tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sample.token_ids])).logits[0, :-1].double()
    mask = torch.tensor(sample.loss_mask[1:]) == 1
    return (logits[mask] / temperature).softmax(-1).tolist(), torch.tensor(sample.token_ids[1:])[mask].tolist()


def slow_outcomes(rows: list[list[float]], own: list[int], span: tuple[int, int]) -> tuple[float, list[float]]:
    path, others = 1.0, []
    for at in range(*span):
        others += [path * p for token, p in enumerate(rows[at]) if token != own[at]]
        path *= rows[at][own[at]]
    return path, sorted(others, reverse=True)


def slow_distance(ours: tuple[float, list[float]], theirs: tuple[float, list[float]], kind: str, k: int) -> float:
    sides = []
    for said, others in (ours, theirs):
        ranked = others if kind == "uld_text" else sorted([said, *others], reverse=True)
        kept = [said] * (kind == "uld_text") + (ranked[:k] if k else ranked)
        sides.append([*kept, *[0.0] * (20_000 - len(kept)), max(0.0, 1 - sum(kept)) if k else 0.0])
    return sum(abs(a - b) for a, b in zip(*sides, strict=True))


@pytest.mark.parametrize(("kind", "k"), [("uld", 0), ("uld", 4), ("uld_text", 0), ("uld_text", 4)])
def test_the_loss_is_that_of_the_models_own_distributions_at_the_groups(models, samples, kind, k):
    distance, gap, groups, aligned, nll, tokens = [0.0, 0.0], 0.0, [0, 0], 0.0, 0.0, 0
    weights = [weight for _, weight in WEIGHTS]
    counts = [sum(len(sample.teachers[m].groups) for sample in samples) for m in (0, 1)]
    for sample in samples:
        rows, own = slow_rows(models[0], sample, OBJECTIVE.temperature)
        plain, _ = slow_rows(models[0], sample, 1.0)
        nll -= sum(math.log(row[token]) for row, token in zip(plain, own, strict=True))
        tokens += len(own)
        for m, teacher in enumerate(sample.teachers):
            theirs = slow_rows(models[1 + m], teacher.sample, OBJECTIVE.temperature)
            for one in teacher.groups:
                said = slow_outcomes(rows, own, (one.start, one.end))
                told = slow_outcomes(*theirs, (one.teacher_start, one.teacher_end))
                distance[m] += slow_distance(said, told, kind, k)
                gap += weights[m] * abs(math.log(said[0]) - math.log(told[0])) / counts[m]
                groups[m] += 1
                aligned += weights[m] * (one.end - one.start)
    assert groups[0] < groups[1] == tokens  # the large vocabulary has fewer ends in common
    wanted = [one / count for one, count in zip(distance, groups, strict=True)]
    divergence = 0.75 * wanted[0] + 0.25 * wanted[1]
    objective = replace(OBJECTIVE, kind=kind, k=k)
    output = objective.compute(
        PlacedModel(models[0], 0, CPU), taught(models, samples, k), objective.denominators(samples)
    )
    found = {name: value.item() for name, value in output.metrics.items()}
    assert found == near(
        {
            "divergence": divergence,
            "divergence/large": wanted[0],
            "divergence/own": wanted[1],
            "nll": nll / tokens,
            "aligned": aligned / tokens,
            "logprob_gap": gap,
            "loss": 0.4 * nll / tokens + 0.6 * divergence,
        },
        12 * of_model(TINY),  # the logits are up to 12 times as large as a model's usual ones
    )
    assert output.loss.item() == found["loss"] and min(wanted) > 0.05


def gradients(
    models: list[nn.Module], samples: list[AlignedSample], batches: list[list[CrossTokenizerSample]], k: int
) -> Tensor:
    objective = replace(OBJECTIVE, k=k)
    counts = objective.denominators(samples)
    models[0].zero_grad()
    for batch in batches:
        objective.compute(PlacedModel(models[0], 0, CPU), batch, counts).loss.backward()
    return torch.cat([p.grad.flatten() for p in models[0].parameters() if p.grad is not None])


@pytest.mark.parametrize("k", [0, 4])
def test_the_gradient_depends_neither_on_micro_batches_nor_on_chunks(models, samples, k, monkeypatch):
    told = taught(models, samples, k)
    whole = gradients(models, samples, [told], k)
    alone = gradients(models, samples, [[one] for one in told], k)
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 320 * 7)  # seven positions at once: chunks end inside groups
    chunks = gradients(models, samples, [told], k)
    for other in (alone, chunks):
        assert (whole - other).abs().max() / whole.abs().max() < 12 * of_model(TINY)
