"""Distillation: divergences of two-token vocabularies worked by hand, slow loops, and the limits of the JSD."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.distillation import distillation_loss, topk_distillation_loss
from rlhf_core.errors import ConfigError

STUDENT_TV = torch.tensor([[0.5, 0.5]]).log()
TEACHER_TV = torch.tensor([[0.8, 0.2]]).log()


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(logits: list[float], temperature: float) -> list[float]:
    exps = [math.exp(x / temperature) for x in logits]
    return [x / sum(exps) for x in exps]


def slow(teacher: list[float], student: list[float], kind: str, beta: float) -> float:
    if kind == "forward":
        return kl(teacher, student)
    if kind == "reverse":
        return kl(student, teacher)
    mixture = [beta * a + (1 - beta) * b for a, b in zip(teacher, student, strict=True)]
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def test_the_three_kinds_on_two_tokens() -> None:
    # 0.8 log 1.6 + 0.2 log 0.4 = 0.19274; 0.5 log 0.625 + 0.5 log 2.5 = 0.22314; mixture (0.65, 0.35)
    losses = [
        distillation_loss(STUDENT_TV, TEACHER_TV, kind=kind).loss.item() for kind in ("forward", "reverse", "jsd")
    ]
    jsd = (0.8 * math.log(0.8 / 0.65) + 0.2 * math.log(0.2 / 0.35) - math.log(2) - 0.5 * math.log(0.65 * 0.35)) / 2
    assert losses == pytest.approx([0.1927447, 0.2231436, jsd], rel=1e-6)


def random_logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(15)
    return 2 * torch.randn(9, 12, generator=generator), 2 * torch.randn(9, 12, generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize(("kind", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
def test_the_loss_matches_a_slow_loop(kind: Any, beta: float, temperature: float) -> None:
    student_TV, teacher_TV = random_logits()
    terms = [
        slow(softmax(t, temperature), softmax(s, temperature), kind, beta)
        for s, t in zip(student_TV.tolist(), teacher_TV.tolist(), strict=True)
    ]
    output = distillation_loss(student_TV, teacher_TV, kind=kind, jsd_beta=beta, temperature=temperature)
    assert output.loss.item() == pytest.approx(sum(terms) / 9, rel=1e-6)


def test_the_ends_of_the_jsd_are_the_two_kl_divergences() -> None:
    logits = random_logits()
    forward, reverse = (distillation_loss(*logits, kind=kind).loss.item() for kind in ("forward", "reverse"))
    assert distillation_loss(*logits, kind="jsd", jsd_beta=0.0).loss.item() == forward
    assert distillation_loss(*logits, kind="jsd", jsd_beta=1.0).loss.item() == reverse
    # ... to which it is proportional: JSD(b) / b -> forward as b -> 0, JSD(b) / (1 - b) -> reverse as b -> 1
    double = tuple(x.double() for x in logits)
    near = distillation_loss(*double, kind="jsd", jsd_beta=1e-8).loss.item() / 1e-8
    assert near == pytest.approx(forward, rel=1e-3)
    near = distillation_loss(*double, kind="jsd", jsd_beta=1 - 1e-8).loss.item() / 1e-8
    assert near == pytest.approx(reverse, rel=1e-3)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(kind: Any) -> None:
    student_TV = random_logits()[0].requires_grad_(True)
    output = distillation_loss(
        student_TV, student_TV.detach() + 3.0, kind=kind
    )  # a shift of all logits changes nothing
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert student_TV.grad is not None and student_TV.grad.abs().max() < 1e-6
    assert output.metrics["agreement"].item() == 1.0


def test_the_gradient_of_the_forward_kl_is_the_difference_of_the_probabilities() -> None:
    student_TV = STUDENT_TV.clone().requires_grad_(True)
    distillation_loss(student_TV, TEACHER_TV, kind="forward", tokens=2.0).loss.backward()
    assert student_TV.grad is not None and student_TV.grad[0].tolist() == pytest.approx([-0.15, 0.15], rel=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_top_k_matches_a_slow_loop_over_the_k_and_the_rest(kind: Any) -> None:
    student_TV, teacher_TV = random_logits()
    top = teacher_TV.log_softmax(dim=1).topk(4, dim=1)
    terms = []
    for row in range(9):
        ids = top.indices[row].tolist()
        teacher, student = softmax(teacher_TV[row].tolist(), 1.0), softmax(student_TV[row].tolist(), 1.0)
        merged = [[p[i] for i in ids] + [1 - sum(p[i] for i in ids)] for p in (teacher, student)]
        terms.append(slow(*merged, kind, 0.5))
    output = topk_distillation_loss(student_TV, top.values, top.indices, kind=kind)
    assert output.loss.item() == pytest.approx(sum(terms) / 9, rel=1e-5)  # 1 - sum of the K, in fp32
    full = distillation_loss(student_TV, teacher_TV, kind=kind)
    assert output.loss.item() <= full.loss.item()
    assert output.metrics["agreement"].item() == full.metrics["agreement"].item()


def test_top_k_of_all_but_one_token_is_the_full_divergence() -> None:
    student_TV, teacher_TV = (x.double() for x in random_logits())
    top = (teacher_TV / 1.5).log_softmax(dim=1).topk(11, dim=1)
    few = topk_distillation_loss(student_TV, top.values, top.indices, kind="jsd", temperature=1.5)
    full = distillation_loss(student_TV, teacher_TV, kind="jsd", temperature=1.5)
    assert few.loss.item() == pytest.approx(full.loss.item(), rel=1e-9)


def test_a_teacher_certain_of_its_k_tokens_gives_a_finite_loss() -> None:
    student_TV = torch.tensor([[0.0, 0.0, -300.0]], requires_grad=True)  # and the student leaves no rest either
    ids_TK, logprobs_TK = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]).log()
    output = topk_distillation_loss(student_TV, logprobs_TK, ids_TK, kind="reverse")
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert student_TV.grad is not None and bool(student_TV.grad.isfinite().all())


def test_a_k_of_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_k = 2: .* distill the full vocabulary"):
        topk_distillation_loss(STUDENT_TV, TEACHER_TV, torch.tensor([[0, 1]]), kind="forward")
