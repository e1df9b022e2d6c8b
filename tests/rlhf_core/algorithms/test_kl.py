"""KL estimators against their closed forms and against an enumerated expectation; coefficient controllers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch

from rlhf_core.algorithms.token_math import AdaptiveKL, FixedKL, KLInLoss, k1, k2, k3, kl_in_loss
from rlhf_core.errors import ConfigError


def test_the_estimators_match_hand_computed_numbers() -> None:
    logprobs, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])  # d = 0.5, -1
    assert k1(logprobs, ref).tolist() == [0.5, -1.0]
    assert k2(logprobs, ref).tolist() == [0.125, 0.5]
    assert k3(logprobs, ref).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2.0], rel=1e-6)


def test_the_estimators_match_a_slow_loop_in_single_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs, ref = (torch.randn(40, generator=generator) - 3 for _ in range(2))
    d = [a - b for a, b in zip(logprobs.tolist(), ref.tolist(), strict=True)]
    assert k1(logprobs, ref).tolist() == pytest.approx(d, rel=1e-6, abs=1e-6)
    assert k2(logprobs, ref).tolist() == pytest.approx([x * x / 2 for x in d], rel=1e-6, abs=1e-6)
    assert k3(logprobs, ref).tolist() == pytest.approx([math.exp(-x) - 1 + x for x in d], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_their_gradients_are_those_of_finite_differences(estimator) -> None:  # type: ignore[no-untyped-def]
    logprobs = torch.tensor([-1.0, -2.5, -0.3], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -4.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: estimator(x, ref), (logprobs,))


def test_equal_models_have_a_divergence_of_exactly_zero() -> None:
    logprobs = torch.tensor([-0.3, -4.0, -11.0])
    for estimator in (k1, k2, k3):
        assert estimator(logprobs, logprobs.clone()).tolist() == [0.0, 0.0, 0.0]


def test_k1_and_k3_are_unbiased_for_the_reverse_kl() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    for estimator in (k1, k3):  # the expectation over all three outcomes, not a sample of them
        assert (p * estimator(p.log(), q.log())).sum().item() == pytest.approx(exact, rel=1e-12)


def test_k2_as_a_loss_has_the_gradient_of_the_reverse_kl_and_k1_has_none() -> None:
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    weights = logprobs.detach().exp()  # the expectation over samples, through which no gradient flows
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True)
    (from_k2,) = torch.autograd.grad((weights * k2(logprobs, ref)).sum(), logits, retain_graph=True)
    (from_k1,) = torch.autograd.grad((weights * k1(logprobs, ref)).sum(), logits)
    assert from_k2.tolist() == pytest.approx(exact.tolist(), rel=1e-9)
    assert from_k1.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_log_ratios_beyond_twenty_are_clamped() -> None:
    assert k1(torch.tensor([0.0]), torch.tensor([-500.0])).item() == 20.0
    assert math.isfinite(k3(torch.tensor([-500.0]), torch.tensor([0.0])).item())


def test_a_fixed_coefficient_ignores_what_it_observes() -> None:
    assert FixedKL(coef=0.05).updated(kl=100.0, samples=512) == FixedKL(coef=0.05)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (12.0, 1 + 0.2 * 100 / 1000),  # error 1.0, clipped to 0.2
        (6.6, 1 + 0.1 * 100 / 1000),  # error 0.1
        (6.0, 1.0),
        (0.0, 1 - 0.2 * 100 / 1000),  # error -1.0, clipped to -0.2
    ],
)
def test_the_adaptive_coefficient_follows_the_published_rule(kl: float, factor: float) -> None:
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=1000.0)
    assert controller.updated(kl=kl, samples=100).coef == pytest.approx(0.1 * factor, rel=1e-12)


def test_a_controller_survives_a_checkpoint() -> None:
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=1000.0).updated(kl=9.0, samples=64)
    assert AdaptiveKL(**json.loads(json.dumps(asdict(controller)))) == controller


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kl\.target = 0"):
        AdaptiveKL(coef=0.1, target=0.0, horizon=1000.0)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k2", 0.5 * 0.5 / 2, 0.5),
        ("k1", 0.5, 0.5),
        ("k3", math.exp(-0.5) - 1 + 0.5, 0.5),
        ("k3_direct", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_a_penalty_in_the_loss_has_the_value_of_its_estimator_and_the_gradient_of_k2(
    estimator: KLInLoss, value: float, slope: float
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)  # d = -1.0 + 1.5 = 0.5
    term = kl_in_loss(logprobs, torch.tensor([-1.5], dtype=torch.float64), estimator=estimator)
    term.sum().backward()
    assert term.item() == pytest.approx(value, rel=1e-12)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k2", "k1", "k3", "k3_direct"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_but_for_k3_itself(estimator: KLInLoss) -> None:
    """Exact expectation over three tokens: sum of pi grad(term) against autograd's gradient of KL(pi || pi_ref)."""
    logits = torch.tensor([0.3, -0.4, 1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, 0.5, 0.1], dtype=torch.float64).log_softmax(dim=0)
    logprobs = logits.log_softmax(dim=0)
    expected = (logprobs.detach().exp() * kl_in_loss(logprobs, reference, estimator=estimator)).sum()
    (ours,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (reverse,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits)
    assert torch.allclose(ours, forward if estimator == "k3_direct" else reverse, atol=1e-12)
    assert not torch.allclose(forward, reverse, atol=1e-3)
