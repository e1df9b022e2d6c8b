"""Formulas of several losses against slow loops in Python floats; what all losses share is in `test_invariances`."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.algorithms.token_math import (
    AdaptiveKL,
    CorrectionConfig,
    FixedKL,
    Mismatch,
    at_least_fp32,
    bounded,
    bradley_terry_loss,
    clipped_value_loss,
    ensemble_score,
    explained_variance,
    k1,
    k2,
    k3,
    kl_in_loss,
    masked_count,
    masked_sum,
    reduce_steps,
    schulman_k3,
    sft_loss,
    step_loss,
    whiten,
)
from rlhf_core.errors import DataError
from rlhf_core.schema.base import keyed

NAN = float("nan")


def drawn(seed: int, *shape: int, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


def some(seed: int, *shape: int) -> Tensor:
    """Return a mask with a row without tokens."""
    mask_BL = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask_BL[2] = False
    return mask_BL


# ---------------------------------------------------------------- masks


def test_a_nan_at_a_masked_position_reaches_neither_the_sum_nor_the_gradient():
    x_BL = torch.tensor([[1.0, NAN, 2.0]], requires_grad=True)
    total = masked_sum(x_BL, torch.tensor([[1, 0, 1]]))
    total.backward()
    assert total.item() == 3.0
    assert x_BL.grad is not None and x_BL.grad.tolist() == [[1.0, 0.0, 1.0]]


def test_precision_is_raised_to_fp32_and_never_lowered():
    x_BL = torch.full((1, 1000), 1.0, dtype=torch.bfloat16)  # bf16 has 8 bits: it would stop counting at 256
    assert masked_sum(x_BL, torch.ones(1, 1000)).item() == 1000.0
    dtypes = [at_least_fp32(torch.ones(1, dtype=d)).dtype for d in (torch.bfloat16, torch.float32, torch.float64)]
    assert dtypes == [torch.float32, torch.float32, torch.float64]


def test_the_count_of_an_empty_mask_is_one_so_that_nothing_divides_by_zero():
    assert masked_count(torch.tensor([[1, 0, 1]])).item() == 2
    assert masked_count(torch.zeros(2, 3)).item() == 1


def test_k3_keeps_small_differences_and_huge_log_ratios_are_clamped():
    # exp(-d) - 1 + d = d^2/2 for small d: the plain fp32 form would give 0 or 6e-8 noise here.
    assert math.isclose(schulman_k3(torch.tensor(1e-2)).item(), 4.983374916805357e-05, rel_tol=1e-3)
    assert bounded(torch.tensor([1e4, -1e4, 3.0])).tolist() == [20.0, -20.0, 3.0]
    assert k1(torch.tensor([0.0]), torch.tensor([-500.0])).item() == 20.0
    assert math.isfinite(k3(torch.tensor([-500.0]), torch.tensor([0.0])).item())


def test_whitened_values_have_mean_zero_and_population_variance_one_over_the_mask():
    (values_BL,), mask_BL = drawn(3, 4, 6, count=1), some(3, 4, 6)
    white_BL = whiten(torch.where(mask_BL, 3 * values_BL + 2, NAN), mask_BL)
    at = (3 * values_BL + 2)[mask_BL].tolist()
    mean = sum(at) / len(at)
    std = (sum((x - mean) ** 2 for x in at) / len(at)) ** 0.5
    assert white_BL[mask_BL].tolist() == pytest.approx([(x - mean) / std for x in at], rel=1e-5, abs=1e-6)
    assert bool((white_BL[~mask_BL] == 0).all())
    assert whiten(torch.ones(2, 2), torch.zeros(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]


# ---------------------------------------------------------------- KL


def test_the_estimators_match_a_slow_loop_and_are_zero_for_equal_models():
    logprobs, ref = (x - 3 for x in drawn(0, 40))
    d = [a - b for a, b in zip(logprobs.tolist(), ref.tolist(), strict=True)]
    slow: dict[Any, Callable[[float], float]] = {
        k1: lambda x: x,
        k2: lambda x: x * x / 2,
        k3: lambda x: math.exp(-x) - 1 + x,
    }
    for estimator, formula in slow.items():
        assert estimator(logprobs, ref).tolist() == pytest.approx(list(map(formula, d)), rel=1e-6, abs=1e-6)
        assert estimator(logprobs, logprobs.clone()).tolist() == [0.0] * 40


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k2", 0.5 * 0.5 / 2, 0.5),
        ("k1", 0.5, 0.5),
        ("k3", math.exp(-0.5) - 1 + 0.5, 0.5),
        ("k3_direct", math.exp(-0.5) - 1 + 0.5, 1 - math.exp(-0.5)),
    ],
)
def test_a_penalty_in_the_loss_has_the_value_of_its_estimator_and_the_gradient_of_k2(estimator, value, slope):
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)  # d = -1.0 + 1.5 = 0.5
    term = kl_in_loss(logprobs, torch.tensor([-1.5], dtype=torch.float64), estimator=estimator)
    term.sum().backward()
    assert term.item() == pytest.approx(value, rel=1e-12)
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope, rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (12.0, 1 + 0.2 * 100 / 1000),  # error 1.0, clipped to 0.2
        (6.6, 1 + 0.1 * 100 / 1000),  # error 0.1
        (6.0, 1.0),
        (0.0, 1 - 0.2 * 100 / 1000),  # error -1.0, clipped to -0.2
    ],
)
def test_the_adaptive_coefficient_follows_the_published_rule_and_survives_a_checkpoint(kl, factor):
    controller = AdaptiveKL(coef=0.1, target=6.0, horizon=1000.0).updated(kl=kl, samples=100)
    assert controller.coef == pytest.approx(0.1 * factor, rel=1e-12)
    assert AdaptiveKL(**json.loads(json.dumps(asdict(controller)))) == controller
    assert FixedKL(coef=0.05).updated(kl=kl, samples=512) == FixedKL(coef=0.05)


# ---------------------------------------------------------------- correction


OLD_BL = torch.tensor([[0.5, 2.0, 8.0, 9.0], [1.0, 9.0, 9.0, 9.0]]).log()
ROLLOUT_BL = torch.zeros(2, 4)
MASK_BL = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
"""Three tokens with ratios 1/2, 2 and 8 in row 0, one with ratio 1 in row 1."""


def slow_weights(old: list[float], rollout: list[float], level: str, mode: str) -> list[float]:
    """The weights of one row's trained tokens, in Python floats; window [0.9, 1.1]."""
    logs = [a - b for a, b in zip(old, rollout, strict=True)]
    if level == "sequence":
        logs = [sum(logs)] * len(logs)
    if level == "geometric":
        logs = [sum(logs) / len(logs)] * len(logs)
    ratios = [math.exp(x) for x in logs]
    return [min(q, 1.1) if mode == "truncate" else q * (0.9 <= q <= 1.1) for q in ratios]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_weights_match_a_slow_loop_whatever_stands_outside_the_mask(level, mode):
    (old_BL, rollout_BL), mask_BL = (0.2 * x - 2 for x in drawn(16, 6, 8)), some(16, 6, 8)
    rollout_BL[5] = old_BL[5] - 0.01  # a sequence that every level keeps
    dirty = [torch.where(mask_BL, x, NAN).requires_grad_() for x in (old_BL, rollout_BL)]
    weights_BL, changed_BL = CorrectionConfig(level=level, mode=mode, cap=1.1, low=0.9).weights(*dirty, mask_BL)
    assert not weights_BL.requires_grad
    assert bool((weights_BL[~mask_BL] == 0).all()) and not changed_BL[~mask_BL].any()
    expected: list[float] = []
    for b in range(6):
        at = mask_BL[b]
        expected += slow_weights(old_BL[b, at].tolist(), rollout_BL[b, at].tolist(), level, mode) if at.any() else []
    assert weights_BL[mask_BL].tolist() == pytest.approx(expected, rel=1e-5)
    assert changed_BL[mask_BL].tolist() == [w == 1.1 if mode == "truncate" else w == 0.0 for w in expected]
    assert changed_BL.any() and not changed_BL[mask_BL].all()


def test_without_a_correction_every_trained_token_weighs_one():
    weights_BL, changed_BL = CorrectionConfig(level="off", mode="mask").weights(OLD_BL, ROLLOUT_BL, MASK_BL)
    assert weights_BL.tolist() == MASK_BL.tolist() and not changed_BL.any()


def test_a_mask_of_sequences_may_weigh_the_tokens_that_it_keeps_one_by_one():
    # geometric means: exp((0.6 - 0.2) / 2) = 1.12 is kept, exp(-2) = 0.14 is not
    tensors = torch.tensor([[0.6, -0.2], [-2.0, -2.0]]), torch.zeros(2, 2), torch.ones(2, 2)
    config = CorrectionConfig(level="geometric", mode="mask", cap=5.0, low=0.5)
    for token_cap, kept in ((1.5, [1.5, math.exp(-0.2)]), (0.0, [math.exp(0.2)] * 2)):
        weights_BL, changed_BL = config.model_copy(update={"token_cap": token_cap}).weights(*tensors)
        assert weights_BL[0].tolist() == pytest.approx(kept, rel=1e-6)
        assert weights_BL[1].tolist() == [0.0, 0.0]
        assert changed_BL.tolist() == [[False, False], [True, True]]


@pytest.mark.parametrize("other", [{"mode": "truncate", "level": "geometric"}, {"mode": "mask", "level": "token"}])
def test_a_cap_of_tokens_needs_a_mask_of_sequences(other):
    with pytest.raises(ValidationError, match=r"token_cap = 2\.0: applies to mode = 'mask'"):
        CorrectionConfig(token_cap=2.0, **other)
    assert "token_cap" not in keyed(CorrectionConfig()), "results from before the option keep their keys"


# A coin of mu = 0.5 and pi_old = 0.6, 0.5 or 0.9: KL(mu || pi_old) = log(0.5) - (log p + log(1 - p)) / 2
# = 0.02041, 0 and 0.51083; the total variation is 0.1, 0 and 0.4.
COINS_BL = torch.tensor([[0.6, 0.5, 0.9], [0.6, 0.5, 0.123]]).log(), torch.full((2, 3), 0.5).log()
COINS_MASK_BL = torch.tensor([[1, 1, 1], [1, 1, 0]])
Q, R = 1.2, 1.8
"""Ratios 0.6 / 0.5 and 0.9 / 0.5."""


@pytest.mark.parametrize(
    ("level", "gate", "most", "weights"),
    [
        ("token", "kl", 0.0203, [[0, 1, 0], [0, 1, 0]]),
        ("token", "kl", 0.0205, [[Q, 1, 0], [Q, 1, 0]]),
        ("token", "tv", 0.2, [[Q, 1, 0], [Q, 1, 0]]),
        ("sequence", "kl", 0.0103, [[0, 0, 0], [Q, 1, 0]]),  # means (0.02041 + 0.51083) / 3 = 0.17708, 0.01021
        ("sequence", "kl", 0.0101, [[0, 0, 0], [0, 0, 0]]),
        ("geometric", "kl", 0.178, [[Q, 1, 1.5], [Q, 1, 0]]),
        ("geometric", "tv", 0.17, [[Q, 1, 1.5], [Q, 1, 0]]),  # means 0.5 / 3 and 0.05
        ("geometric", "tv", 0.16, [[0, 0, 0], [Q, 1, 0]]),
    ],
)
def test_a_gate_of_divergence_drops_units_and_weighs_the_tokens_of_others_by_their_ratio(level, gate, most, weights):
    config = CorrectionConfig(level=level, mode="mask", gate=gate, max_divergence=most, cap=1.5, low=1.1)
    weights_BL, changed_BL = config.weights(*COINS_BL, COINS_MASK_BL)
    assert weights_BL.flatten().tolist() == pytest.approx([x for row in weights for x in row], rel=1e-6)
    assert torch.equal(changed_BL, (weights_BL == 0) & (COINS_MASK_BL == 1)) and R > 1.5


@pytest.mark.parametrize("other", [{"mode": "truncate"}, {"level": "off"}, {"level": "sequence", "token_cap": 2.0}])
def test_a_gate_of_divergence_needs_a_mask_without_another_weight(other):
    with pytest.raises(ValidationError, match=r"gate = 'kl': applies to mode = \"mask\""):
        CorrectionConfig(**{"mode": "mask", "gate": "kl"} | other)
    assert {"gate", "max_divergence"}.isdisjoint(keyed(CorrectionConfig()))


def test_the_mismatch_metrics_match_hand_computed_numbers_and_do_not_see_outside_the_mask():
    metrics = Mismatch.of(*(torch.where(MASK_BL != 0, x, NAN) for x in (OLD_BL, ROLLOUT_BL)), MASK_BL).metrics()
    log2 = math.log(2)
    assert metrics == pytest.approx(
        {
            "log_q_mean": (1 + 1 + 3 + 0) * log2 / 4,
            "log_q_max": 3 * log2,
            "exp_abs_log_q": (2 + 2 + 8 + 1) / 4,
            "k3": sum(q - 1 - math.log(q) for q in (0.5, 2, 8, 1)) / 4,
            "ess": 11.5**2 / (4 * (0.25 + 4 + 64 + 1)),
            "correlation": 0.0,  # the sampler's probabilities are constant
        },
        rel=1e-6,
    )
    with pytest.raises(DataError, match="selects no token"):
        Mismatch.of(OLD_BL, ROLLOUT_BL, torch.zeros(2, 4))


def test_the_correlation_is_that_of_the_probabilities_and_agreement_is_exact():
    old_BL, rollout_BL = torch.tensor([[0.2, 0.4, 0.9]]).log(), torch.tensor([[0.1, 0.5, 0.8]]).log()
    # deviations (-0.3, -0.1, 0.4) and (-11, 1, 10)/30: 1/30 * (3.3 - 0.1 + 4) / sqrt(0.26 * 222/900)
    expected = 7.2 / 30 / math.sqrt(0.26 * 222 / 900)
    assert Mismatch.of(old_BL, rollout_BL, torch.ones(1, 3)).metrics()["correlation"] == pytest.approx(
        expected, rel=1e-5
    )
    same = Mismatch.of(OLD_BL, OLD_BL.clone(), MASK_BL).metrics()
    assert same == {"log_q_mean": 0, "log_q_max": 0, "exp_abs_log_q": 1, "k3": 0, "ess": 1, "correlation": 1}


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_matches_a_slow_loop(clip):
    (values, old, returns), mask = drawn(2, 4, 6, count=3), some(2, 4, 6)
    terms, moved, at = [], 0, []
    for b, t in mask.nonzero().tolist():
        v, o, r = values[b, t].item(), old[b, t].item(), returns[b, t].item()
        clipped = v if clip is None else o + min(max(v - o, -clip), clip)
        terms.append(0.5 * max((clipped - r) ** 2, (v - r) ** 2))
        moved += (clipped - r) ** 2 > (v - r) ** 2
        at.append(v)
    output = clipped_value_loss(values, old, returns, mask, clip=clip)
    metrics = {name: value.item() for name, value in output.metrics.items()}
    loss, count = sum(terms) / len(terms), len(terms)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    expected = {"value_loss": loss, "value_clip_fraction": moved / count, "value_mean": sum(at) / count}
    assert metrics == pytest.approx(expected, rel=1e-6, abs=1e-7)
    assert (moved > 0) == (clip is not None)


def test_explained_variance_is_one_for_perfect_values_and_zero_for_a_constant():
    returns_BL, mask_BL = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance([(returns_BL, returns_BL, mask_BL)]) == 1.0
    assert explained_variance([(torch.full((1, 4), 2.0), returns_BL, mask_BL)]) == 0.0
    # values (1, 2, 2): residuals (0, 0, 1), variance 2/9 against 2/3
    assert explained_variance([(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), returns_BL, mask_BL)]) == pytest.approx(2 / 3)
    assert explained_variance([(torch.randn(1, 3), torch.ones(1, 3), torch.ones(1, 3))]) == 0.0  # nothing to explain
    assert explained_variance([(returns_BL, returns_BL, torch.zeros(1, 4))]) == 0.0


# ---------------------------------------------------------------- demonstrations


@pytest.mark.parametrize("dft", [False, True])
def test_the_supervised_loss_matches_a_slow_loop(dft):
    (logprobs_BL,), mask_BL = (x - 2 for x in drawn(4, 5, 6, count=1)), some(4, 5, 6)
    at = logprobs_BL[mask_BL].tolist()
    output = sft_loss(logprobs_BL, mask_BL, dft=dft)
    expected = sum(-x * (math.exp(x) if dft else 1.0) for x in at) / len(at)
    assert output.loss.item() == pytest.approx(expected, rel=1e-6)
    assert output.metrics["nll"].item() == pytest.approx(
        -sum(at) / len(at), rel=1e-6
    )  # the plain mean, to compare runs


def test_the_probability_by_which_dft_weighs_a_token_has_no_gradient():
    # p = 1/2 and 1/4: gradient -p / 2
    logprobs_BL = torch.tensor([[math.log(0.5), math.log(0.25)]], requires_grad=True)
    sft_loss(logprobs_BL, torch.ones(1, 2), dft=True).loss.backward()
    assert logprobs_BL.grad is not None and logprobs_BL.grad[0].tolist() == pytest.approx([-0.25, -0.125], rel=1e-6)


# ---------------------------------------------------------------- reward models


@pytest.mark.parametrize("margin", [0.0, 0.7, torch.tensor([0.0, 1.0, 2.0, 0.5, 0.1])])
def test_the_bradley_terry_loss_matches_a_slow_loop(margin):
    chosen, rejected = (2 * x for x in drawn(6, 5))
    margins = margin.tolist() if isinstance(margin, Tensor) else [margin] * 5
    rows = list(zip(chosen.tolist(), rejected.tolist(), margins, strict=True))
    loss = sum(math.log1p(math.exp(-(c - r - m))) + 0.02 * (c + r) ** 2 for c, r, m in rows) / 5
    output = bradley_terry_loss(chosen, rejected, margin=margin, center_coef=0.02)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    expected = {
        "loss": loss,
        "accuracy": sum(c > r for c, r, _ in rows) / 5,
        "margin": sum(c - r for c, r, _ in rows) / 5,
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected, rel=1e-6)


def test_equal_scores_have_no_accuracy_and_half_precision_is_compared_in_fp32():
    assert bradley_terry_loss(torch.zeros(4), torch.zeros(4)).metrics["accuracy"].item() == 0.0
    half = bradley_terry_loss(torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([0.5], dtype=torch.bfloat16)).loss
    assert half.dtype == torch.float32 and half.item() == pytest.approx(math.log1p(math.exp(-0.5)), rel=1e-6)


def test_an_ensemble_reduces_to_its_mean_its_worst_or_its_mean_less_the_spread():
    # second row: mean 3, deviations -2, 0, 2, population variance 8/3
    scores_MB = torch.tensor([[1.0, 1.0], [1.0, 3.0], [1.0, 5.0]])
    assert ensemble_score(scores_MB, reduce="mean").tolist() == [1.0, 3.0]
    assert ensemble_score(scores_MB, reduce="min").tolist() == [1.0, 1.0]
    expected = [1.0, 3 - 0.5 * math.sqrt(8 / 3)]
    assert ensemble_score(scores_MB, reduce="mean_minus_std", k=0.5).tolist() == pytest.approx(expected, rel=1e-6)
    assert ensemble_score(torch.tensor([[2.0, -1.0]]), reduce="mean_minus_std").tolist() == [2.0, -1.0]


# ---------------------------------------------------------------- process reward models


def test_the_step_loss_matches_a_slow_loop():
    logits_S, labels_S = 3 * drawn(14, 30, count=1)[0], torch.rand(30, generator=torch.Generator().manual_seed(14))
    rows = [(x, y, 1 / (1 + math.exp(-x))) for x, y in zip(logits_S.tolist(), labels_S.tolist(), strict=True)]
    loss = sum(-y * math.log(p) - (1 - y) * math.log(1 - p) for _, y, p in rows) / 30
    output = step_loss(logits_S, labels_S)
    assert output.loss.item() == pytest.approx(loss, rel=1e-6)
    expected = {
        "loss": loss,
        "accuracy": sum((x > 0) == (y > 0.5) for x, y, _ in rows) / 30,
        "positive_fraction": sum(y > 0.5 for _, y, _ in rows) / 30,
    }
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(expected, rel=1e-6)


def test_a_huge_logit_costs_itself_and_a_logit_of_zero_is_never_right():
    assert step_loss(torch.tensor([-200.0]), torch.tensor([1])).loss.item() == 200.0
    assert step_loss(torch.zeros(4), torch.tensor([0.0, 1.0, 0.0, 1.0])).metrics["accuracy"].item() == 0.0


@pytest.mark.parametrize("label", [-0.1, 1.5, NAN])
def test_a_label_that_is_no_probability_is_refused(label):
    with pytest.raises(DataError, match=r"labels = .* scale them to \[0, 1\]"):
        step_loss(torch.zeros(1), torch.tensor([label]))


@pytest.mark.parametrize(
    ("how", "expected"),
    [("min", [0.2, 0.5]), ("mean", [0.5, 0.5]), ("last", [0.4, 0.5]), ("product", [0.072, 0.125])],
)
def test_the_steps_of_an_answer_reduce_to_one_score(how, expected):
    # 0.2; (0.9 + 0.2 + 0.4) / 3; 0.4; 0.9 * 0.2 * 0.4
    scores = reduce_steps(torch.tensor([[0.9, 0.2, 0.4], [0.5, 0.5, 0.5]]), how=how)
    assert scores.tolist() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DataError, match="steps = 0"):
        reduce_steps(torch.zeros(0), how=how)
