"""Divergences from one teacher, several, and teachers with other tokens, against slow loops and cases by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.distillation import (
    distillation_loss,
    group_outcomes,
    multi_teacher_loss,
    normalized_weights,
    other_tokens,
    topk_distillation_loss,
    uld_loss,
)
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


def test_the_three_kinds_on_two_tokens():
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
def test_the_loss_matches_a_slow_loop(kind, beta, temperature):
    student_TV, teacher_TV = random_logits()
    terms = [
        slow(softmax(t, temperature), softmax(s, temperature), kind, beta)
        for s, t in zip(student_TV.tolist(), teacher_TV.tolist(), strict=True)
    ]
    output = distillation_loss(student_TV, teacher_TV, kind=kind, jsd_beta=beta, temperature=temperature)
    assert output.loss.item() == pytest.approx(sum(terms) / 9, rel=1e-6)


def test_the_ends_of_the_jsd_are_the_two_kl_divergences():
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
def test_a_student_equal_to_its_teacher_has_nothing_to_learn(kind):
    student_TV = random_logits()[0].requires_grad_(True)
    output = distillation_loss(
        student_TV, student_TV.detach() + 3.0, kind=kind
    )  # a shift of all logits changes nothing
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert student_TV.grad is not None and student_TV.grad.abs().max() < 1e-6
    assert output.metrics["agreement"].item() == 1.0


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_top_k_matches_a_slow_loop_over_the_k_and_the_rest(kind):
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


def test_a_teacher_certain_of_its_k_tokens_gives_a_finite_loss():
    student_TV = torch.tensor([[0.0, 0.0, -300.0]], requires_grad=True)  # and the student leaves no rest either
    ids_TK, logprobs_TK = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]]).log()
    output = topk_distillation_loss(student_TV, logprobs_TK, ids_TK, kind="reverse")
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.0, abs=1e-6)
    assert student_TV.grad is not None and bool(student_TV.grad.isfinite().all())


def test_a_k_of_the_whole_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"top_k = 2: .* distill the full vocabulary"):
        topk_distillation_loss(STUDENT_TV, TEACHER_TV, torch.tensor([[0, 1]]), kind="forward")


# ---------------------------------------------------------------- several teachers: the weighted sum has the gradient of the mixture


WEIGHTS = normalized_weights({"one": 1.0, "two": 4.0, "three": 3.0})
NO_IDS = torch.empty(7, 0, dtype=torch.long)


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(7, 300, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def teachers(temperature: float) -> list[tuple[Tensor, Tensor]]:
    return [((logits(seed) / temperature).log_softmax(dim=1), NO_IDS) for seed in (11, 12, 13)]


@pytest.mark.parametrize("k", [0, 20])
@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_loss_and_metrics_are_the_weighted_sums_of_those_of_each_teacher(kind, k):
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


def test_a_weight_of_zero_measures_and_teaches_nothing():
    weights = (("one", 1.0), ("two", 0.0))
    given = teachers(1.0)[:2]
    output = multi_teacher_loss(logits(1), given, weights, kind="forward", jsd_beta=0.5, temperature=1.0)
    alone = multi_teacher_loss(logits(1), given[:1], (("one", 1.0),), kind="forward", jsd_beta=0.5, temperature=1.0)
    assert output.loss.item() == alone.loss.item()
    assert output.metrics["divergence/two"].item() > 0.1


# ---------------------------------------------------------------- other tokens: all outcomes of vocabularies of 300 and 1,000 tokens


STUDENT_SPANS, TEACHER_SPANS = [(0, 1), (1, 3), (4, 5), (5, 9)], [(0, 3), (3, 4), (4, 5), (7, 9)]
"""Groups of 1, 2, 1 and 4 tokens of the student are 3, 1, 1 and 2 of the teacher; tokens between them are in no group."""


def model(vocabulary: int, seed: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Random log-probs [9, V], in double, and the text's tokens; each third token is the likeliest of its row."""
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 3 * torch.randn(9, vocabulary, generator=generator, dtype=torch.float64)
    own_T = torch.randint(vocabulary, (9,), generator=generator)
    own_T[::3] = logits_TV[::3].argmax(dim=1)
    return torch.log_softmax(logits_TV / temperature, dim=1), own_T


def slow_outcomes(logprobs_TV: Tensor, own_T: Tensor, span: tuple[int, int]) -> tuple[float, list[float]]:
    """The probability of the text of a group, and of every other way to go on, token by token."""
    path, others = 1.0, []
    for at in range(*span):
        probabilities = [math.exp(x) for x in logprobs_TV[at].tolist()]
        others += [path * p for token, p in enumerate(probabilities) if token != own_T[at]]
        path *= probabilities[own_T[at]]
    return path, others


def slow_distance(student: tuple[float, list[float]], teacher: tuple[float, list[float]], kind: str, k: int) -> float:
    sides = []
    for text, others in (student, teacher):
        ranked = sorted(others, reverse=True)
        if kind == "uld":
            ranked = sorted([text, *others], reverse=True)
        kept = ranked[:k] if k else ranked
        rest = sum(ranked) - sum(kept)
        sides.append(([text] if kind == "uld_text" else []) + kept + [0.0] * (10_000 - len(kept)) + [rest])
    return sum(abs(a - b) for a, b in zip(*sides, strict=True))


def outcomes(logprobs_TV: Tensor, own_T: Tensor, spans: list[tuple[int, int]], k: int) -> tuple[Tensor, Tensor]:
    own_logprobs_T = logprobs_TV.gather(1, own_T.unsqueeze(1)).squeeze(1)
    return group_outcomes(own_logprobs_T, other_tokens(logprobs_TV, own_T, k=k), spans, k=k)


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("kind", ["uld", "uld_text"])
def test_the_loss_matches_a_slow_loop_over_all_outcomes(kind, k):
    student, teacher = model(300, 1), model(1000, 2)
    expected = [
        slow_distance(slow_outcomes(*student, ours), slow_outcomes(*teacher, theirs), kind, k)
        for ours, theirs in zip(STUDENT_SPANS, TEACHER_SPANS, strict=True)
    ]
    sides = *outcomes(*student, STUDENT_SPANS, k), *outcomes(*teacher, TEACHER_SPANS, k)
    output = uld_loss(*sides, kind=kind, k=k)
    # Double precision: 4,000 terms of at most 1, so 1e-12 is far above their rounding.
    assert output.loss.item() == pytest.approx(sum(expected) / 4, rel=1e-12)
    assert uld_loss(*sides, kind=kind, k=k, groups=16.0).loss.item() == pytest.approx(sum(expected) / 16, rel=1e-12)


def test_the_outcomes_of_a_group_add_up_to_one_and_its_text_is_the_product_of_its_tokens():
    logprobs_TV, own_T = model(300, 5)
    text_G, others_GN = outcomes(logprobs_TV, own_T, STUDENT_SPANS, 0)
    assert others_GN.shape == (4, 4 * 299)
    assert (text_G.exp() + others_GN.sum(dim=1)).tolist() == pytest.approx([1.0] * 4, rel=1e-12)
    own = logprobs_TV.gather(1, own_T.unsqueeze(1)).squeeze(1).tolist()
    assert text_G.tolist() == pytest.approx([own[0], own[1] + own[2], own[4], sum(own[5:9])], rel=1e-12)


@pytest.mark.parametrize("kind", ["uld", "uld_text"])
def test_a_student_that_cuts_the_same_words_otherwise_is_at_distance_zero(kind):
    """The teacher's tokens are `hello` 0.6, `help` 0.3, `ok` 0.1; the student's `he` 0.9, `ok` 0.1, then `llo` 2/3, `lp` 1/3.

    Multiplying the student's first distribution by 2/3 instead would give (0.6, 0.0667), a loss of 1/3.
    """
    teacher = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    student = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 2 / 3, 1 / 3]], dtype=torch.float64).log()
    ours = outcomes(student, torch.tensor([0, 2]), [(0, 2)], 0)
    output = uld_loss(*ours, *outcomes(teacher, torch.tensor([0]), [(0, 1)], 0), kind=kind, k=0)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-12)
    assert output.metrics["logprob_gap"].item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("kind", ["uld", "uld_text"])
def test_the_gradient_is_that_of_finite_differences_and_the_teacher_has_none(kind, k):
    logits_TV = model(12, 6)[0].requires_grad_(True)
    own_T, teacher = model(12, 6)[1], model(17, 7)
    teacher_logits_TV = teacher[0].requires_grad_(True)

    def loss(logits_TV: Tensor) -> Tensor:
        ours = outcomes(logits_TV.log_softmax(dim=1), own_T, STUDENT_SPANS, k)
        theirs = outcomes(teacher_logits_TV, teacher[1], TEACHER_SPANS, k)
        return uld_loss(*ours, *theirs, kind=kind, k=k).loss

    assert torch.autograd.gradcheck(loss, (logits_TV,), eps=1e-6, atol=1e-7, rtol=1e-5)
    loss(logits_TV).backward()
    assert logits_TV.grad is not None and logits_TV.grad.norm() > 0
    assert teacher_logits_TV.grad is None


def test_without_groups_the_loss_is_zero_and_can_be_trained_on():
    logits_TV = torch.zeros(3, 5, requires_grad=True)
    ours = outcomes(logits_TV.log_softmax(dim=1), torch.zeros(3, dtype=torch.long), [], 2)
    output = uld_loss(*ours, torch.empty(0), torch.empty(0, 2), kind="uld_text", k=2)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logits_TV.grad is not None and bool((logits_TV.grad == 0).all())
