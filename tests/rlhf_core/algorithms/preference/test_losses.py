"""Preference losses against slow loops in Python floats and numbers of one pair; more of them is in `test_invariances`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.algorithms import preference
from rlhf_core.algorithms.preference.answers import BCOLoss, KTOLoss, RewardShift, kto_kl
from rlhf_core.algorithms.preference.base import PairBatch, length_desensitised
from rlhf_core.algorithms.preference.dpo import DPOLoss, DPONormLoss, EXOLoss, FDPOLoss, RobustDPOLoss
from rlhf_core.errors import ConfigError
from tests.support.losses import of_answers, of_pairs

METHODS: dict[str, Any] = {kind.model_fields["type"].default: kind for kind in preference.METHODS}
PAIR = (torch.tensor([-10.0]), torch.tensor([-21.0]), torch.tensor([-12.0]), torch.tensor([-20.0]))
"""Log-ratios 2 (chosen) and -1 (rejected), so h = 3."""
dpo_loss, kto_loss, bco_loss = of_pairs(DPOLoss), of_answers(KTOLoss), of_answers(BCOLoss)


def softplus(x: float) -> float:
    """-log sigmoid(-x)."""
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def log_odds(x: float) -> float:
    return x - math.log1p(-math.exp(x))


DERIVATIVES: dict[Any, Callable[[float], float]] = {
    "reverse_kl": lambda u: math.log(u),
    "forward_kl": lambda u: -1 / u,
    "js": lambda u: math.log(2 * u / (1 + u)),
    "alpha": lambda u: (1 - u**-0.3) / 0.3,
}
Term = Callable[[float, float], float]
SLOW: dict[str, tuple[dict[str, Any], Term]] = {
    # the options, and the term of one pair from x = beta a and y = beta b, beta = 0.1
    "dpo": ({}, lambda x, y: softplus(y - x)),
    "cdpo": ({"label_smoothing": 0.2}, lambda x, y: 0.8 * softplus(y - x) + 0.2 * softplus(x - y)),
    "robust": ({"label_smoothing": 0.2}, lambda x, y: (0.8 * softplus(y - x) - 0.2 * softplus(x - y)) / 0.6),
    "ipo": ({"length_average": False}, lambda x, y: (10 * (x - y) - 5) ** 2),
    "hinge": ({}, lambda x, y: max(0.0, 1 - (x - y))),
    "apo_zero": ({}, lambda x, y: 1 - sigmoid(x) + sigmoid(y)),
    "apo_down": ({}, lambda x, y: sigmoid(x) + 1 - sigmoid(x - y)),
    "sppo": ({}, lambda x, y: (10 * x - 5) ** 2 + (10 * y + 5) ** 2),
    "nca": ({}, lambda x, y: softplus(-x) + softplus(x) / 2 + softplus(y) / 2),
    "exo": (
        {"label_smoothing": 1e-3},
        lambda x, y: (
            sigmoid(x - y) * math.log(sigmoid(x - y) / 0.999) + sigmoid(y - x) * math.log(sigmoid(y - x) / 0.001)
        ),
    ),
    "discopop": (
        {"tau": 0.05},
        lambda x, y: sigmoid((y - x) / 0.05) * softplus(y - x) + sigmoid((x - y) / 0.05) * math.exp(y - x),
    ),
    "aot": ({"label_smoothing": 0.2}, lambda x, y: 0.8 * softplus(y - x) + 0.2 * softplus(x - y)),
}


def columns(seed: int, count: int) -> tuple[list[Tensor], list[tuple[float, ...]]]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [8 * torch.randn(20, generator=generator) - 30 for _ in range(count)]
    return drawn, list(zip(*(column.tolist() for column in drawn), strict=True))


@pytest.mark.parametrize("name", SLOW)
def test_the_loss_and_its_metrics_match_a_slow_loop_over_pairs(name):
    scalars, term = SLOW[name]
    drawn, rows = columns(11, 4)
    rewards = [(0.1 * (c - rc), 0.1 * (r - rr)) for c, r, rc, rr in rows]
    loss = sum(term(x, y) for x, y in rewards) / 20
    output = of_pairs(METHODS[name])(*drawn, beta=0.1, **scalars)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    expected = {
        "loss": loss,
        "rewards/chosen": sum(x for x, _ in rewards) / 20,
        "rewards/rejected": sum(y for _, y in rewards) / 20,
        "rewards/margin": sum(x - y for x, y in rewards) / 20,
        "rewards/accuracy": sum(x > y for x, y in rewards) / 20,
        "logprobs/chosen": sum(c for c, *_ in rows) / 20,
        "logprobs/rejected": sum(r for _, r, *_ in rows) / 20,
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected, rel=1e-5)


def test_a_policy_equal_to_its_reference_has_accuracy_zero():
    assert dpo_loss(*PAIR[:2], *PAIR[:2], beta=0.1).metrics["rewards/accuracy"].item() == 0.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (RobustDPOLoss, {"label_smoothing": 0.5}, "label_smoothing"),
        (EXOLoss, {"label_smoothing": 0.0}, "label_smoothing"),
        (EXOLoss, {"label_smoothing": 1.0}, "label_smoothing"),
        (FDPOLoss, {"divergence": "js", "alpha": 0.3}, r'alpha = 0\.3: applies only to divergence = "alpha"'),
    ],
)
def test_options_without_a_finite_loss_or_a_meaning_are_refused(kind, options, message):
    with pytest.raises(ValidationError, match=message):
        kind(**options)


def test_a_loss_on_single_answers_refuses_pairs():
    fields = dict.fromkeys(PairBatch.__dataclass_fields__, None) | {"pairs": 1.0, "tokens": 1.0}
    with pytest.raises(ConfigError, match="trains on single answers"):
        KTOLoss().loss(PairBatch(**fields))


def test_discopop_is_finite_far_on_the_wrong_side():
    # exp(-beta h) alone would overflow at h = -1000 and poison the sum: inf * 0
    chosen, zero = torch.tensor([-1000.0], requires_grad=True), torch.zeros(1)
    output = of_pairs(METHODS["discopop"])(chosen, zero, zero, zero, beta=1.0)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(1000.0, rel=1e-6)
    assert chosen.grad is not None and chosen.grad.item() == pytest.approx(-1.0, rel=1e-6)


# ---------------------------------------------------------------- lengths


def test_losses_on_mean_logprobs_match_slow_loops():
    generator = torch.Generator().manual_seed(12)
    lengths = [torch.randint(3, 30, (20,), generator=generator) for _ in range(2)]
    logprobs = [-(0.3 + torch.rand(20, generator=generator)) * length for length in lengths]
    rows = list(zip(*(x.tolist() for x in (*logprobs, *lengths)), strict=True))
    named: dict[str, Any] = dict(zip(("chosen_lengths", "rejected_lengths"), lengths, strict=True))
    terms: dict[str, tuple[dict[str, float], Term]] = {  # from the mean log-prob of the chosen and the rejected answer
        "simpo": ({"beta": 2.5, "gamma": 0.8}, lambda c, r: softplus(-(2.5 * (c - r) - 0.8))),
        "dpo_norm": ({"beta": 2.0}, lambda c, r: softplus(-2.0 * (c - r))),
        "ipo": ({"beta": 0.25}, lambda c, r: (c - r - 2.0) ** 2),
    }
    for name, (options, term) in terms.items():
        loss = of_pairs(METHODS[name])(*logprobs, **named, **options).loss.item()
        assert loss == pytest.approx(sum(term(c / m, r / n) for c, r, m, n in rows) / 20, rel=1e-6), name
    nll = -sum(c for c, *_ in rows) / sum(m for _, _, m, _ in rows)
    ratio = sum(softplus(-(log_odds(c / m) - log_odds(r / n))) for c, r, m, n in rows) / 20
    metrics = of_pairs(METHODS["orpo"])(*logprobs, **named, odds_weight=0.4).metrics
    expected = {
        "loss": nll + 0.4 * ratio,
        "nll": nll,
        "odds_ratio_loss": ratio,
        "log_odds_ratio": sum(log_odds(c / m) - log_odds(r / n) for c, r, m, n in rows) / 20,
        "rewards/margin": 0.4 * sum(c / m - r / n for c, r, m, n in rows) / 20,
    }
    assert {name: metrics[name].item() for name in expected} == pytest.approx(expected, rel=1e-5)


LENGTHS: dict[str, Any] = {"chosen_lengths": torch.tensor([4]), "rejected_lengths": torch.tensor([6])}


def test_the_terms_of_orpo_have_denominators_of_their_own():
    # 4 of 16 chosen tokens and 1 of 2 pairs of the step; mean log-prob -1
    logprobs, loss = (torch.tensor([-4.0]), torch.tensor([-12.0])), of_pairs(METHODS["orpo"])
    metrics = loss(*logprobs, **LENGTHS, odds_weight=0.1, pairs=2.0, tokens=16.0).metrics
    whole = loss(*logprobs, **LENGTHS, odds_weight=0.1).metrics
    assert (whole["nll"].item(), metrics["nll"].item()) == (1.0, 0.25)
    assert metrics["odds_ratio_loss"].item() == pytest.approx(whole["odds_ratio_loss"].item() / 2, rel=1e-6)


def test_certain_and_empty_answers_have_finite_losses():
    chosen = torch.tensor([0.0], requires_grad=True)
    output = of_pairs(METHODS["orpo"])(chosen, torch.tensor([-600.0]), **LENGTHS, odds_weight=0.1)
    output.loss.backward()
    assert math.isfinite(output.loss.item())
    assert chosen.grad is not None and chosen.grad.item() == -0.25  # the likelihood's alone
    zero, empty = torch.zeros(1), {"chosen_lengths": torch.zeros(1), "rejected_lengths": torch.ones(1)}
    assert of_pairs(DPONormLoss)(zero, zero, zero, zero, **empty).loss.item() == pytest.approx(math.log(2))


MASK_BL = torch.tensor([[0, 1, 1, 1], [1, 0, 1, 0]])  # lengths 3 and 2


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (1.0, [-9.0, -4.0]),  # the plain sums
        (0.5, [-2 - 0.5 * 3 - 0.5 * 4, -4.0]),  # the other answers have 1 and 5 tokens
        (0.0, [-2.0, -4.0]),
    ],
)
def test_tokens_beyond_the_shorter_answer_count_alpha_and_those_outside_the_mask_nothing(alpha, expected):
    logprobs_BL = torch.tensor([[math.nan, -2.0, -3.0, -4.0], [-1.0, math.nan, -3.0, math.inf]], requires_grad=True)
    sums_B = length_desensitised(logprobs_BL, MASK_BL, torch.tensor([[0, 0, 1, 0, 0], [1, 1, 1, 1, 1]]), alpha=alpha)
    sums_B.sum().backward()
    assert sums_B.tolist() == expected
    assert logprobs_BL.grad.tolist() == [[0.0, 1.0, alpha, alpha], [1.0, 0.0, 1.0, 0.0]]


# ---------------------------------------------------------------- f-DPO


@pytest.mark.parametrize("divergence", DERIVATIVES)
def test_f_dpo_is_logistic_in_the_derivatives_of_the_divergence(divergence):
    chosen, rejected = (0.1 * DERIVATIVES[divergence](math.exp(x)) for x in (2.0, -1.0))
    options = {"alpha": 0.3} if divergence == "alpha" else {}
    output = of_pairs(FDPOLoss)(*PAIR, beta=0.1, divergence=divergence, **options)
    assert output.loss.item() == pytest.approx(softplus(rejected - chosen), rel=1e-6)
    assert output.metrics["rewards/chosen"].item() == pytest.approx(chosen, rel=1e-5)
    assert output.metrics["rewards/rejected"].item() == pytest.approx(rejected, rel=1e-5)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_an_answer_that_became_all_but_impossible_gives_finite_numbers(divergence):
    log_u_B = torch.tensor([-500.0, 500.0], requires_grad=True)
    value_B = FDPOLoss(divergence=divergence).derivative(log_u_B)
    (gradient_B,) = torch.autograd.grad(value_B.sum(), log_u_B)
    assert bool(torch.isfinite(value_B).all()) and bool(torch.isfinite(gradient_B).all())


@pytest.mark.parametrize(("divergence", "log_u"), [("forward_kl", -25.0), ("alpha", -50.0)])
def test_an_answer_beyond_the_bound_is_still_pulled_back(divergence, log_u):
    log_u_B = torch.tensor([log_u], requires_grad=True)
    (gradient_B,) = torch.autograd.grad(FDPOLoss(divergence=divergence).derivative(log_u_B).sum(), log_u_B)
    assert gradient_B.item() == pytest.approx(math.exp(20), rel=1e-5)
    lower_B = FDPOLoss(divergence=divergence).derivative(torch.tensor([log_u - 1, log_u]))
    assert lower_B[0] < lower_B[1]


# ---------------------------------------------------------------- single answers


ROWS = (torch.tensor([-10.0, -21.0]), torch.tensor([-12.0, -20.0]), torch.tensor([True, False]))  # log-ratios 2, -1
KTO: dict[str, Any] = {"kl": 0.5, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.5}
BCO: dict[str, Any] = {"shift": 0.05, "beta": 0.1}


@pytest.mark.parametrize(
    ("loss", "options", "good", "bad"),
    [
        (kto_loss, KTO, lambda x: 1 - sigmoid(0.1 * (x - 0.5)), lambda x: 1.5 * (1 - sigmoid(0.1 * (0.5 - x)))),
        (bco_loss, BCO, lambda x: softplus(0.05 - 0.1 * x), lambda x: softplus(0.1 * x - 0.05)),
    ],
)
def test_the_loss_on_answers_matches_a_slow_loop(loss, options, good, bad):
    (logprobs, ref), rows = columns(13, 2)
    desirable = torch.rand(20, generator=torch.Generator().manual_seed(13)) > 0.4
    labelled = [(a - b, label) for (a, b), label in zip(rows, desirable.tolist(), strict=True)]
    expected = sum(good(x) if label else bad(x) for x, label in labelled) / 20
    output = loss(logprobs, ref, desirable.float(), **options)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    for name, of in (("desirable", True), ("undesirable", False)):
        rewards = [0.1 * x for x, label in labelled if label == of]
        assert output.metrics[f"rewards/{name}"].item() == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)


def test_a_step_without_undesirable_rows_reports_zero_for_them():
    metrics = kto_loss(ROWS[0], ROWS[1], torch.tensor([True, True]), **KTO).metrics
    assert metrics["rewards/undesirable"].item() == 0.0
    assert metrics["rewards/desirable"].item() == pytest.approx(0.05, rel=1e-6)


def test_the_means_of_a_part_need_the_counts_of_the_step():
    # one desirable row here, of two desirable and two undesirable ones in the step
    metrics = kto_loss(*(x[:1] for x in ROWS), **KTO, rows=4.0, desirable_rows=2.0).metrics
    assert metrics["rewards/desirable"].item() == pytest.approx(0.1, rel=1e-6)
    assert metrics["kl"].item() == 0.125


def test_the_reference_point_is_the_mean_log_ratio_and_never_negative():
    logprobs = torch.tensor([-9.0, -10.0], requires_grad=True)
    assert kto_kl(logprobs, torch.tensor([-12.0, -9.0])).item() == 1.0  # (3 - 1) / 2
    assert kto_kl(logprobs, torch.tensor([-8.0, -9.0])).item() == 0.0  # -1, clamped after the mean
    assert not kto_kl(logprobs, torch.tensor([-12.0, -9.0])).requires_grad
    assert kto_kl(torch.zeros(0), torch.zeros(0)).item() == 0.0


def trl_kto(
    logprobs: Tensor,
    ref: Tensor,
    kl_logprobs: Tensor,
    ref_kl_logprobs: Tensor,
    good: Tensor,
    *,
    beta: float,
    weights: tuple[float, float],
) -> Tensor:
    """`KTOTrainer.kto_loss` of TRL and what `get_batch_loss_metrics` makes of it, written down from there."""
    kl = (kl_logprobs - ref_kl_logprobs).mean().detach().clamp(min=0)
    chosen_losses = 1 - torch.sigmoid(beta * (logprobs[good] - ref[good] - kl))
    rejected_losses = 1 - torch.sigmoid(beta * (kl - (logprobs[~good] - ref[~good])))
    return torch.cat((weights[0] * chosen_losses, weights[1] * rejected_losses), 0).nanmean()


@pytest.mark.parametrize("good", [[True] * 5 + [False] * 2, [True] + [False] * 6, [True] * 7, [False] * 7])
def test_loss_and_gradient_on_unpaired_rows_are_those_of_trl(good):
    generator = torch.Generator().manual_seed(5)
    rows = [3 * torch.randn(7, generator=generator, dtype=torch.float64) - 30 for _ in range(4)]
    logprobs, ref, kl_logprobs, ref_kl_logprobs = rows
    logprobs.requires_grad_(True)
    desirable = torch.tensor(good)
    expected = trl_kto(logprobs, ref, kl_logprobs + 2, ref_kl_logprobs, desirable, beta=0.3, weights=(1.3, 0.7))
    (slope,) = torch.autograd.grad(expected, logprobs)
    kl = float(kto_kl(kl_logprobs + 2, ref_kl_logprobs))
    scalars: dict[str, Any] = {"kl": kl, "beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    # In micro-batches of two: the counts are those of the step.
    parts = [
        kto_loss(
            logprobs[i : i + 2], ref[i : i + 2], desirable[i : i + 2], rows=7.0, desirable_rows=1.0, **scalars
        ).loss
        for i in range(0, 7, 2)
    ]
    (own,) = torch.autograd.grad(sum(parts), logprobs)
    # float64: a sum of seven terms of order 1
    assert float(sum(parts)) == pytest.approx(expected.item(), abs=1e-15 * 16)
    torch.testing.assert_close(own, slope, rtol=0, atol=1e-15)


def test_the_means_run_each_on_its_own_and_start_with_what_is_seen_first():
    shift = RewardShift().after(desirable=[2.0, 4.0], undesirable=[], decay=0.9)
    assert (shift.desirable, shift.undesirable, shift.delta) == (3.0, None, 3.0)
    shift = shift.after(desirable=[13.0], undesirable=[-1.0], decay=0.9)
    assert (shift.desirable, shift.undesirable) == (pytest.approx(0.9 * 3 + 0.1 * 13), -1.0)
    assert shift.delta == pytest.approx((4.0 - 1.0) / 2)
    assert RewardShift().delta == 0.0


def test_rewards_that_are_not_finite_leave_the_means_alone():
    seen = RewardShift(3.0, -1.0)
    poisoned = seen.after(desirable=[math.nan, 5.0], undesirable=[math.nan, math.inf], decay=0.5)
    assert poisoned == RewardShift(4.0, -1.0)
    assert RewardShift().after(desirable=[math.nan], undesirable=[], decay=0.5) == RewardShift()
