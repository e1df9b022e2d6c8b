"""ULD across tokenizers: a slow loop over all outcomes of vocabularies of 300 and 1,000 tokens, and cases by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_core.algorithms.distillation import group_outcomes, other_tokens, uld_loss

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
def test_the_loss_matches_a_slow_loop_over_all_outcomes(kind: Any, k: int) -> None:
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


def test_one_token_against_one_token_is_the_formula_of_the_paper() -> None:
    student, teacher = model(300, 3)[0], model(1000, 4)[0]
    own_T = torch.zeros(9, dtype=torch.long)
    spans = [(at, at + 1) for at in range(9)]
    output = uld_loss(*outcomes(student, own_T, spans, 0), *outcomes(teacher, own_T, spans, 0), kind="uld", k=0)
    ranked = [x.exp().sort(dim=1, descending=True).values for x in (student, teacher)]
    distance = (ranked[0] - ranked[1][:, :300]).abs().sum() + ranked[1][:, 300:].sum()  # 700 zeros for the student
    assert output.loss.item() == pytest.approx(distance.item() / 9, rel=1e-12)


def test_the_outcomes_of_a_group_add_up_to_one_and_its_text_is_the_product_of_its_tokens() -> None:
    logprobs_TV, own_T = model(300, 5)
    text_G, others_GN = outcomes(logprobs_TV, own_T, STUDENT_SPANS, 0)
    assert others_GN.shape == (4, 4 * 299)
    assert (text_G.exp() + others_GN.sum(dim=1)).tolist() == pytest.approx([1.0] * 4, rel=1e-12)
    own = logprobs_TV.gather(1, own_T.unsqueeze(1)).squeeze(1).tolist()
    assert text_G.tolist() == pytest.approx([own[0], own[1] + own[2], own[4], sum(own[5:9])], rel=1e-12)


@pytest.mark.parametrize("kind", ["uld", "uld_text"])
def test_a_student_that_cuts_the_same_words_otherwise_is_at_distance_zero(kind: Any) -> None:
    """The teacher's tokens are `hello` 0.6, `help` 0.3, `ok` 0.1; the student's `he` 0.9, `ok` 0.1, then `llo` 2/3, `lp` 1/3.

    Multiplying the student's first distribution by 2/3 instead would give (0.6, 0.0667), a loss of 1/3.
    """
    teacher = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64).log()
    student = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.0, 0.0, 2 / 3, 1 / 3]], dtype=torch.float64).log()
    ours = outcomes(student, torch.tensor([0, 2]), [(0, 2)], 0)
    output = uld_loss(*ours, *outcomes(teacher, torch.tensor([0]), [(0, 1)], 0), kind=kind, k=0)
    assert output.loss.item() == pytest.approx(0.0, abs=1e-12)
    assert output.metrics["logprob_gap"].item() == pytest.approx(0.0, abs=1e-12)


def test_sorting_forgets_which_token_is_meant_and_the_text_does_not() -> None:
    # The teacher says the text with 0.8, the student with 0.2: sorted they are the same, on the text they are 0.6 apart.
    student, teacher = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.2, 0.8], [0.8, 0.2]))
    sides = [outcomes(x, torch.tensor([0]), [(0, 1)], 0) for x in (student, teacher)]
    losses = [uld_loss(*sides[0], *sides[1], kind=kind, k=0) for kind in ("uld", "uld_text")]
    assert [one.loss.item() for one in losses] == pytest.approx([0.0, 1.2], abs=1e-12)
    assert losses[0].metrics["logprob_gap"].item() == pytest.approx(math.log(4), rel=1e-12)


def test_fewer_outcomes_give_a_lower_bound_and_sorting_all_is_never_more_than_keeping_the_text() -> None:
    for seed in range(20):
        student, teacher = model(300, seed), model(1000, 100 + seed)
        losses: dict[str, list[float]] = {"uld": [], "uld_text": []}
        for kind, found in losses.items():
            for k in (1, 5, 50, 299, 0):
                sides = *outcomes(*student, STUDENT_SPANS, k), *outcomes(*teacher, TEACHER_SPANS, k)
                found.append(uld_loss(*sides, kind=kind, k=k).loss.item())  # type: ignore[arg-type]
            assert all(few <= more + 1e-12 for few, more in itertools.pairwise(found))
            assert 0 < found[-1] <= 2
        assert losses["uld"][-1] <= losses["uld_text"][-1] + 1e-12


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("kind", ["uld", "uld_text"])
def test_the_gradient_is_that_of_finite_differences_and_the_teacher_has_none(kind: Any, k: int) -> None:
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


def test_without_groups_the_loss_is_zero_and_can_be_trained_on() -> None:
    logits_TV = torch.zeros(3, 5, requires_grad=True)
    ours = outcomes(logits_TV.log_softmax(dim=1), torch.zeros(3, dtype=torch.long), [], 2)
    output = uld_loss(*ours, torch.empty(0), torch.empty(0, 2), kind="uld_text", k=2)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logits_TV.grad is not None and bool((logits_TV.grad == 0).all())
