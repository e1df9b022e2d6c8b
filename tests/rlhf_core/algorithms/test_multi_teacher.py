"""Several teachers: the weighted sum has the gradient of the mixture, arithmetic or geometric, over 300 tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.distillation import (
    distillation_loss,
    multi_teacher_loss,
    normalized_weights,
    topk_distillation_loss,
)

WEIGHTS = normalized_weights({"one": 1.0, "two": 4.0, "three": 3.0})
NO_IDS = torch.empty(7, 0, dtype=torch.long)


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(7, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def teachers(temperature: float) -> list[tuple[Tensor, Tensor]]:
    return [((logits(seed) / temperature).log_softmax(dim=1), NO_IDS) for seed in (11, 12, 13)]


def gradient_and_loss(student_TV: Tensor, kind: Any, temperature: float) -> tuple[Tensor, float]:
    student_TV = student_TV.clone().requires_grad_(True)
    output = multi_teacher_loss(
        student_TV, teachers(temperature), WEIGHTS, kind=kind, jsd_beta=0.3, temperature=temperature
    )
    output.loss.backward()
    assert student_TV.grad is not None
    return student_TV.grad, output.loss.item()


def kl(p_TV: Tensor, q_TV: Tensor) -> Tensor:
    return (p_TV * (p_TV.log() - q_TV.log())).sum(dim=1).mean()


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_the_sum_of_divergences_is_the_divergence_from_the_mixture_but_for_a_constant(
    kind: str, temperature: float
) -> None:
    logprobs = torch.stack([one for one, _ in teachers(temperature)])
    w = torch.tensor([1 / 8, 4 / 8, 3 / 8], dtype=torch.float64).view(3, 1, 1)
    arithmetic_TV = (w * logprobs.exp()).sum(dim=0)
    geometric_TV = (w * logprobs).sum(dim=0).softmax(dim=1)
    constants = []
    for seed in (1, 2):  # two students: what is left does not depend on the student
        student_TV = logits(seed).requires_grad_(True)
        q_TV = (student_TV / temperature).softmax(dim=1)
        target = kl(arithmetic_TV, q_TV) if kind == "forward" else kl(q_TV, geometric_TV)
        target.backward()
        gradient, loss = gradient_and_loss(logits(seed), kind, temperature)
        assert student_TV.grad is not None
        torch.testing.assert_close(gradient, student_TV.grad, rtol=1e-9, atol=1e-12)
        constants.append(loss - target.item())
    assert constants[0] == pytest.approx(constants[1], rel=1e-9)
    assert constants[0] > 0.1


@pytest.mark.parametrize("k", [0, 20])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_loss_and_metrics_are_the_weighted_sums_of_those_of_each_teacher(kind: Any, k: int) -> None:
    student_TV, given, alone = logits(1), [], []
    for seed in (11, 12, 13):
        top = (logits(seed) / 1.3).log_softmax(dim=1).topk(20, dim=1)
        given.append((top.values, top.indices) if k else ((logits(seed) / 1.3).log_softmax(dim=1), NO_IDS))
        options: dict[str, Any] = {"kind": kind, "jsd_beta": 0.3, "temperature": 1.3, "tokens": 70.0}
        alone.append(
            topk_distillation_loss(student_TV, top.values, top.indices, **options)
            if k
            else distillation_loss(student_TV, logits(seed), **options)
        )
    output = multi_teacher_loss(student_TV, given, WEIGHTS, kind=kind, jsd_beta=0.3, temperature=1.3, tokens=70.0)
    for name in ("loss", "agreement"):
        wanted = sum(weight * one.metrics[name].item() for (_, weight), one in zip(WEIGHTS, alone, strict=True))
        assert output.metrics[name].item() == pytest.approx(wanted, rel=1e-6)
    for (name, _), one in zip(WEIGHTS, alone, strict=True):
        assert output.metrics[f"divergence/{name}"].item() == pytest.approx(one.loss.item(), rel=1e-9)


def test_one_teacher_is_distillation_from_it_alone() -> None:
    student_TV, (teacher, *_) = logits(1), teachers(1.3)
    output = multi_teacher_loss(
        student_TV, [teacher], (("teacher", 1.0),), kind="jsd", jsd_beta=0.3, temperature=1.3, tokens=5.0
    )
    alone = distillation_loss(student_TV, teacher[0] * 1.3, kind="jsd", jsd_beta=0.3, temperature=1.3, tokens=5.0)
    assert output.loss.item() == alone.loss.item()
    assert set(output.metrics) == {"loss", "agreement"}


def test_a_weight_of_zero_measures_and_teaches_nothing() -> None:
    weights = (("one", 1.0), ("two", 0.0))
    given = teachers(1.0)[:2]
    output = multi_teacher_loss(logits(1), given, weights, kind="forward", jsd_beta=0.5, temperature=1.0)
    alone = multi_teacher_loss(logits(1), given[:1], (("one", 1.0),), kind="forward", jsd_beta=0.5, temperature=1.0)
    assert output.loss.item() == alone.loss.item()
    assert output.metrics["divergence/two"].item() > 0.1
