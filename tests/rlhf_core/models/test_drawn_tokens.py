"""Log-probs and entropies of drawn tokens are those of the plain formulas, and so are their gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rlhf_core.models.forward import logprobs_and_entropy

EPSILON = torch.finfo(torch.float32).eps


def logits_and_targets(tokens: int, vocabulary: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits_CV = 3 * torch.randn(tokens, vocabulary, generator=draw, dtype=dtype)
    return logits_CV.requires_grad_(), torch.randint(vocabulary, (tokens,), generator=draw)


def plain(logits_CV: Tensor, targets_C: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    every_CV = torch.log_softmax(logits_CV / temperature, dim=-1)
    return every_CV.gather(1, targets_C[:, None])[:, 0], -(every_CV.exp() * every_CV).sum(-1)


def assert_rounded(made: Tensor, exact: Tensor, logits_CV: Tensor) -> None:
    """Values and gradients are the exact ones up to the rounding of float32.

    The normalizer is at most about log 152,000 + 9 / 2 = 16: a sum of positive terms, in blocks, within some units of
    16 eps.
    """
    torch.testing.assert_close(made.double(), exact, rtol=0, atol=64 * 16 * EPSILON)
    (gradient,) = torch.autograd.grad(made.sum(), logits_CV)
    (expected,) = torch.autograd.grad(exact.sum(), logits_CV)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=64 * 16 * EPSILON)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_gradients_are_those_of_finite_differences_and_of_the_plain_formulas(
    temperature: float, entropy_gradient: bool
) -> None:
    logits_CV, targets_C = logits_and_targets(5, 11, dtype=torch.float64)
    both = partial(
        logprobs_and_entropy,
        targets_C=targets_C,
        temperature=temperature,
        with_entropy=True,
        entropy_gradient=entropy_gradient,
    )
    taken = 2 if entropy_gradient else 1
    torch.autograd.gradcheck(lambda x: both(x)[:, :taken], logits_CV)

    weights_C2 = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logprobs_C, entropy_C = plain(logits_CV, targets_C, temperature=temperature)
    wanted = torch.stack([logprobs_C, entropy_C if entropy_gradient else entropy_C.detach()], dim=1)
    torch.testing.assert_close(both(logits_CV), wanted, rtol=1e-13, atol=1e-13)
    (expected,) = torch.autograd.grad((wanted * weights_C2).sum(), logits_CV)
    (gradient,) = torch.autograd.grad((both(logits_CV) * weights_C2).sum(), logits_CV)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_a_gradient_of_the_entropy_alone_is_one() -> None:
    logits_CV, targets_C = logits_and_targets(3, 7, dtype=torch.float64)
    made = logprobs_and_entropy(logits_CV, targets_C, temperature=1.0, with_entropy=True, entropy_gradient=True)
    (gradient,) = torch.autograd.grad(made[:, 1].sum(), logits_CV)
    (expected,) = torch.autograd.grad(plain(logits_CV, targets_C, temperature=1.0)[1].sum(), logits_CV)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def test_the_entropy_costs_nothing_unless_it_is_wanted() -> None:
    logits_CV, targets_C = logits_and_targets(3, 7, dtype=torch.float32)
    made = logprobs_and_entropy(logits_CV, targets_C, temperature=1.0, with_entropy=False, entropy_gradient=False)
    assert made[:, 1].tolist() == [0.0] * 3


def test_autocast_rounds_neither_entropies_nor_gradients() -> None:
    logits_CV, targets_C = logits_and_targets(6, 2000, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = logprobs_and_entropy(logits_CV, targets_C, temperature=0.9, with_entropy=True, entropy_gradient=True)
    exact = torch.stack(plain(logits_CV.double(), targets_C, temperature=0.9), dim=1)
    assert_rounded(made, exact, logits_CV)


@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_tokens_that_cannot_be_drawn_leave_gradients_finite(entropy_gradient: bool) -> None:
    logits_CV, targets_C = logits_and_targets(4, 9, dtype=torch.float32)
    banned_V = torch.zeros(9).index_fill(0, torch.tensor([0]), -torch.inf)
    made = logprobs_and_entropy(
        logits_CV + banned_V,
        targets_C.clamp(min=1),
        temperature=1.0,
        with_entropy=False,
        entropy_gradient=entropy_gradient,
    )
    (gradient,) = torch.autograd.grad(made.sum(), logits_CV)
    assert gradient.isfinite().all() and gradient[:, 0].eq(0).all()


def test_no_token_is_no_result() -> None:
    logits_CV = torch.zeros(0, 7, requires_grad=True)
    made = logprobs_and_entropy(
        logits_CV, torch.zeros(0, dtype=torch.long), temperature=1.0, with_entropy=True, entropy_gradient=True
    )
    made.sum().backward()
    assert made.shape == (0, 2) and logits_CV.grad is not None


def test_a_large_vocabulary_in_float32_loses_no_more_than_its_rounding() -> None:
    logits_CV, targets_C = logits_and_targets(6, 152_000, dtype=torch.float32)
    made = logprobs_and_entropy(logits_CV, targets_C, temperature=1.0, with_entropy=True, entropy_gradient=True)
    exact = torch.stack(plain(logits_CV.double(), targets_C, temperature=1.0), dim=1)
    assert_rounded(made, exact, logits_CV)


def test_one_matrix_of_the_vocabulary_is_kept_for_the_backward_pass() -> None:
    logits_CV, targets_C = logits_and_targets(4, 100, dtype=torch.float32)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs_and_entropy(logits_CV * 1.0, targets_C, temperature=1.0, with_entropy=True, entropy_gradient=True)
    assert sorted(kept.values())[-2:] == [4, 400]


def test_a_second_backward_pass_has_the_same_gradient() -> None:
    logits_CV, targets_C = logits_and_targets(4, 9, dtype=torch.float32)
    loss = logprobs_and_entropy(logits_CV, targets_C, temperature=2.0, with_entropy=True, entropy_gradient=True).sum()
    first, second = (torch.autograd.grad(loss, logits_CV, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
