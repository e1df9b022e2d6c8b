"""Policy losses against slow float64 loops and single tokens worked by hand; what all losses share is in `test_invariances`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.algorithms.policy.clip import ClipCovLoss, ClipLoss, GMPOLoss, GSPOLoss, aggregate, token_covariance
from rlhf_core.algorithms.policy.weighted import CISPOLoss, DPPOLoss, SAPOLoss
from rlhf_core.algorithms.token_math import LossOutput, binary_divergence
from tests.support.losses import of_tokens

clip_loss, gspo_loss, gmpo_loss = of_tokens(ClipLoss), of_tokens(GSPOLoss), of_tokens(GMPOLoss)
cispo_loss, sapo_loss, dppo_loss = of_tokens(CISPOLoss), of_tokens(SAPOLoss), of_tokens(DPPOLoss)
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


def one_row(
    loss: Callable[..., LossOutput], log_ratios: list[float], advantage: float, *, logprob: float = 0.0, **options: Any
) -> tuple[float, list[float], dict[str, float]]:
    """Return the loss of a sequence with those log-ratios, its gradient by log pi, and its metrics."""
    logprobs_BL = torch.full((1, len(log_ratios)), logprob, dtype=torch.float64, requires_grad=True)
    ones_BL = torch.ones_like(logprobs_BL)
    old_BL = logprobs_BL.detach() - torch.tensor([log_ratios], dtype=torch.float64)
    output = loss(logprobs_BL, old_BL, advantage * ones_BL, ones_BL, **options)
    output.loss.backward()
    return output.loss.item(), logprobs_BL.grad[0].tolist(), {k: v.item() for k, v in output.metrics.items()}


@pytest.mark.parametrize(
    ("loss", "options", "ratio", "advantage", "expected", "slope", "clipped"),
    [
        (clip_loss, CLIPS, 1.0, 2.0, -2.0, -2.0, 0.0),
        (clip_loss, CLIPS, 1.2, 1.0, -1.2, -1.2, 0.0),  # inside the higher bound of 1.28
        (clip_loss, CLIPS, 1.5, 1.0, -1.28, 0.0, 1.0),  # gained enough
        (clip_loss, CLIPS, 0.5, 1.0, -0.5, -0.5, 0.0),  # a good token that became unlikely is always pulled back
        (clip_loss, CLIPS, 0.5, -1.0, 0.8, 0.0, 1.0),  # lost enough
        (clip_loss, CLIPS, 1.5, -1.0, 1.5, 1.5, 0.0),  # a bad token that became likely is always pushed down
        (clip_loss, CLIPS | {"dual_clip": 3.0}, 10.0, -1.0, 3.0, 0.0, 1.0),  # dual clip bounds negative advantages
        (clip_loss, CLIPS | {"dual_clip": 3.0}, 2.0, -1.0, 2.0, 2.0, 0.0),
        (clip_loss, CLIPS | {"dual_clip": 3.0}, 1.1, 1.0, -1.1, -1.1, 0.0),
        # -w A log pi at log pi = -2: the ratio carries no gradient.
        (cispo_loss, {"clip_high": 0.28}, 1.1, 1.5, 1.1 * 3, -1.1 * 1.5, 0.0),
        (cispo_loss, {"clip_high": 0.28}, 3.0, 1.5, 1.28 * 3, -1.28 * 1.5, 1.0),  # PPO would drop the token
        (cispo_loss, {"clip_high": 0.28}, 0.1, 1.5, 0.1 * 3, -0.1 * 1.5, 0.0),  # open below
        # f(1) = 4 / tau * 1/2 = 2 / tau; f'(1) = 4 * 1/4 = 1 whatever the temperature
        (sapo_loss, {"tau_positive": 2.0, "tau_negative": 5.0}, 1.0, 3.0, -3.0 * 2 / 2, -3.0, 0.0),
        (sapo_loss, {"tau_positive": 2.0, "tau_negative": 5.0}, 1.0, -3.0, 3.0 * 2 / 5, 3.0, 0.0),
    ],
)
def test_a_token_by_hand(loss, options, ratio, advantage, expected, slope, clipped):
    value, (gradient,), metrics = one_row(loss, [math.log(ratio)], advantage, logprob=-2.0, **options)
    assert (value, gradient) == pytest.approx((expected, slope), rel=1e-12)
    assert metrics["clip_fraction"] == clipped
    assert metrics["ratio_max"] == pytest.approx(ratio)


@pytest.mark.parametrize(("ratio", "advantage", "tau"), [(1.5, 1.0, 2.0), (0.4, 1.0, 2.0), (3.0, -2.0, 5.0)])
def test_the_gradient_of_sapo_fades_with_the_distance_of_the_ratio_from_one(ratio, advantage, tau):
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    loss, (gradient,), _ = one_row(sapo_loss, [math.log(ratio)], advantage, tau_positive=2.0, tau_negative=5.0)
    assert loss == pytest.approx(-4 / tau * gate * advantage)
    # f'(rho) rho A = 4 gate (1 - gate) rho A = sech^2(tau (rho - 1) / 2) rho A
    assert gradient == pytest.approx(-(ratio * advantage) / math.cosh(tau * (ratio - 1) / 2) ** 2)


# ---------------------------------------------------------------- whole batches


def random_batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    new, old, adv = (0.6 * torch.randn(5, 7, generator=generator) - 1 for _ in range(3))
    mask = torch.rand(5, 7, generator=generator) > 0.4
    mask[1] = False  # a row without a trained token
    return new, old, adv + 1, mask, 2 * torch.rand(5, 7, generator=generator)


def ppo_term(rho: float, a: float, new: float) -> float:
    value = min(rho * a, min(max(rho, 0.8), 1.28) * a)
    return max(value, 3.0 * a) if a < 0 else value


def cispo_term(rho: float, a: float, new: float) -> float:
    return min(rho, 1.28) * a * new


def slow(term: Callable[[float, float, float], float], aggregation: str, *, by_row: bool = False) -> float:
    """The formula token by token in Python floats, with the ratio of the row for `by_row`; the batch is the whole step."""
    new, old, adv, mask, weights = random_batch()
    rows = []
    for b in range(new.shape[0]):
        at = [t for t in range(new.shape[1]) if mask[b, t]]
        logs = [new[b, t].item() - old[b, t].item() for t in at]
        logs = [sum(logs) / len(logs)] * len(logs) if by_row and logs else logs
        found = [(math.exp(x), adv[b, t].item(), new[b, t].item(), weights[b, t].item()) for x, t in zip(logs, at)]
        rows.append([-w * term(rho, a, n) for rho, a, n, w in found])
    if aggregation == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if aggregation == "seq_mean_token_mean":
        return sum(sum(terms) / len(terms) for terms in rows if terms) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * 8.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "constant"])
@pytest.mark.parametrize(
    ("loss", "options", "term"),
    [(clip_loss, CLIPS | {"dual_clip": 3.0}, ppo_term), (cispo_loss, {"clip_high": 0.28}, cispo_term)],
)
def test_the_loss_matches_a_slow_loop(loss, options, term, aggregation):
    output = loss(*random_batch(), aggregation=aggregation, max_length=8.0, **options)
    assert output.loss.item() == pytest.approx(slow(term, aggregation), rel=1e-6)


def test_gspo_matches_a_slow_loop():
    expected = slow(lambda rho, a, _: min(rho * a, min(max(rho, 0.9), 1.1) * a), "seq_mean_token_mean", by_row=True)
    assert gspo_loss(*random_batch(), clip_low=0.1, clip_high=0.1).loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_three_aggregations_weigh_long_and_short_rows_as_named():
    x_BL, mask_BL = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    scalars = {"tokens": 4.0, "sequences": 2.0, "max_length": 8.0}
    assert aggregate(x_BL, mask_BL, aggregation="token_mean", **scalars).item() == 2.0  # 8 / 4
    assert aggregate(x_BL, mask_BL, aggregation="seq_mean_token_mean", **scalars).item() == 3.0  # (1 + 5) / 2
    assert aggregate(x_BL, mask_BL, aggregation="constant", **scalars).item() == 0.5  # 8 / (2 * 8)


@pytest.mark.parametrize("loss", [clip_loss, gspo_loss, cispo_loss])
def test_on_policy_every_loss_has_the_gradient_of_reinforce_and_a_ratio_of_exactly_one(loss):
    # ratio 1: the token mean of -A grad log pi, with advantages equal along a row
    logprobs_BL = torch.tensor([[-0.5, -1.0], [-2.0, -0.1]], requires_grad=True)
    advantages_BL = torch.tensor([[1.0, 1.0], [-3.0, -3.0]])
    output = loss(logprobs_BL, logprobs_BL.detach(), advantages_BL, torch.ones(2, 2))
    output.loss.backward()
    assert logprobs_BL.grad.tolist() == [[-0.25, -0.25], [0.75, 0.75]]
    assert [output.metrics[name].item() for name in ("ratio_max", "approx_kl", "clip_fraction")] == [1.0, 0.0, 0.0]


def test_approx_kl_is_k3_of_old_against_new():
    # tokens come from the old policy: d = log old - log new = -0.4; k3 = e^0.4 - 1 - 0.4
    assert one_row(clip_loss, [0.4], 1.0)[2]["approx_kl"] == pytest.approx(math.exp(0.4) - 1.4, rel=1e-12)


def test_a_token_of_weight_zero_stays_in_the_denominator():
    ones_BL, weights_BL = torch.ones(1, 2), torch.tensor([[0.5, 0.0]])
    assert clip_loss(torch.zeros(1, 2), torch.zeros(1, 2), ones_BL, ones_BL, weights=weights_BL).loss.item() == -0.25


# ---------------------------------------------------------------- ratios of sequences


def test_gspo_clips_a_sequence_as_a_whole_at_the_bounds_of_the_paper():
    # mean log-ratio 0.01: s = 1.01005 > 1.0004
    loss, gradient, metrics = one_row(gspo_loss, [0.03, -0.01], 1.0)
    assert loss == pytest.approx(-1.0004, rel=1e-12)
    assert (gradient, metrics["clip_fraction"]) == ([0.0, 0.0], 1.0)
    loss, _, _ = one_row(
        gspo_loss, [-0.03, 0.01], -1.0
    )  # s = 0.99005 < 0.9997: the pessimistic bound is the larger loss
    assert loss == pytest.approx(0.9997, rel=1e-12)


GMPO = {"clip_low": 0.3, "clip_high": 0.4}


@pytest.mark.parametrize(
    ("advantage", "kept", "moves"),
    [
        (2.0, [0.4, -1.0, 0.2], [0, 1, 1]),
        (-2.0, [0.8, -0.3, 0.2], [1, 0, 1]),
    ],  # what became likelier; what became rarer
)
def test_gmpo_clips_only_tokens_that_moved_with_their_advantage(advantage, kept, moves):
    loss, gradient, metrics = one_row(gmpo_loss, [0.8, -1.0, 0.2], advantage, **GMPO)
    ratio = math.exp(sum(kept) / 3)
    assert loss == pytest.approx(-advantage * ratio)
    assert gradient == pytest.approx([-advantage * ratio / 3 * move for move in moves])
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_gmpo_is_the_papers_product_of_minima(advantage):
    """arXiv 2507.20673: (product of |min(rho A, clip(rho) A)|)^(1/n), with the sign of A."""
    log_ratios = [0.9, -0.7, 0.1, -0.2]
    low, high = math.exp(-0.3), math.exp(0.4)
    sign = 1 if advantage > 0 else -1
    terms = [min(math.exp(x) * sign, min(max(math.exp(x), low), high) * sign) for x in log_ratios]
    product = math.prod(abs(term) for term in terms) ** (1 / len(terms))
    assert one_row(gmpo_loss, log_ratios, advantage, **GMPO)[0] == pytest.approx(-product * advantage)


# ---------------------------------------------------------------- Clip-Cov


# log pi has mean -2 and A has mean 0 over the four masked tokens
LOGPROBS_BL = torch.tensor([[-1.0, -3.0, 50.0], [-1.0, -3.0, 50.0]])
ADVANTAGES_BL = torch.tensor([[2.0, 2.0, 7.0], [-2.0, -2.0, 7.0]])
MASK_BL = torch.tensor([[1, 1, 0], [1, 1, 0]])


def test_the_covariance_is_centred_over_the_step_and_ignores_the_rest():
    covariance_BL = token_covariance(ADVANTAGES_BL, LOGPROBS_BL, MASK_BL)
    assert covariance_BL.tolist() == [[2.0, -2.0, 0.0], [-2.0, 2.0, 0.0]]
    # its mean is the covariance of log pi and A, which is what lowers the entropy (arXiv 2505.22617)
    pairs = torch.stack([LOGPROBS_BL[MASK_BL != 0], ADVANTAGES_BL[MASK_BL != 0]])
    assert covariance_BL.sum().item() / 4 == pytest.approx(torch.cov(pairs, correction=0)[0, 1].item(), abs=1e-6)


def drawn(fraction: float, seed: int = 0, cov_low: float = 1.0) -> list[tuple[int, int]]:
    method = ClipCovLoss(fraction=fraction, cov_low=cov_low)
    kept_BL = method.step_advantages(ADVANTAGES_BL, LOGPROBS_BL, MASK_BL, seed=seed)
    assert bool(((kept_BL == ADVANTAGES_BL) | (kept_BL == 0)).all())
    return [(row, column) for row, column in (kept_BL != ADVANTAGES_BL).nonzero().tolist()]


def test_tokens_are_drawn_inside_the_bounds_only_at_least_one_and_the_same_for_a_seed():
    assert drawn(1.0) == [(0, 0), (1, 1)]
    assert len(drawn(0.0001)) == 1
    assert drawn(0.25, seed=3) == drawn(0.25, seed=3)
    assert {tuple(drawn(0.25, seed=seed)) for seed in range(20)} == {((0, 0),), ((1, 1),)}
    assert drawn(1.0, cov_low=2.5) == []
    with pytest.raises(ValidationError, match=r"cov_low = 5\.0: must be < cov_high = 5\.0"):
        ClipCovLoss(cov_low=5.0)


# ---------------------------------------------------------------- DPPO


def dppo(
    new: float, old: float, advantage: float, *, divergence: str = "tv", threshold: float = 0.15
) -> tuple[float, float, float]:
    """The loss of a token with those probabilities, its gradient by log pi, and the fraction that was dropped."""
    bounds = {"threshold_low": threshold, "threshold_high": threshold, "ratio_cap": 20.0}
    loss, (slope,), metrics = one_row(
        dppo_loss, [math.log(new / old)], advantage, logprob=math.log(new), divergence=divergence, **bounds
    )
    return loss, slope, metrics["clip_fraction"]


@pytest.mark.parametrize(
    ("new", "old", "advantage", "weight"),
    [
        (0.55, 0.5, 1.0, 1.1),
        (0.01, 0.001, 1.0, 10.0),  # PPO would clip a ratio of 10; the probability has moved by 0.009
        (0.8, 0.5, -1.0, 1.6),  # far off, but the update leads back
        (0.2, 0.5, 1.0, 0.4),
        (0.5, 0.5, 3.0, 1.0),
        (0.01, 0.0001, 2.0, 20.0),  # ratio 100, divergence 0.0099: the cap bounds the weight and keeps the gradient
    ],
)
def test_a_token_that_stays_near_or_returns_has_the_plain_policy_gradient(new, old, advantage, weight):
    assert dppo(new, old, advantage) == pytest.approx((-weight * advantage, -weight * advantage, 0.0))


@pytest.mark.parametrize(("new", "old", "advantage"), [(0.7, 0.5, 1.0), (0.3, 0.5, -1.0), (0.99, 0.83, 1.0)])
def test_a_token_that_goes_on_beyond_the_threshold_is_dropped(new, old, advantage):
    assert dppo(new, old, advantage) == (0.0, 0.0, 1.0)  # PPO keeps 0.99 / 0.83 = 1.19


def test_the_divergences_are_those_of_two_coins():
    new_BL, old_BL = torch.tensor([[0.7]], dtype=torch.float64).log(), torch.tensor([[0.4]], dtype=torch.float64).log()
    assert binary_divergence(new_BL, old_BL, divergence="tv").item() == pytest.approx(0.3)
    coins = [torch.distributions.Bernoulli(probs=x.exp()) for x in (old_BL, new_BL)]
    kl = torch.distributions.kl_divergence(*coins).item()
    assert binary_divergence(new_BL, old_BL, divergence="kl").item() == pytest.approx(kl)
    assert dppo(0.7, 0.4, 1.0, divergence="kl", threshold=kl + 1e-9)[2] == 0.0
    assert dppo(0.7, 0.4, 1.0, divergence="kl", threshold=kl - 1e-9)[2] == 1.0


def test_a_certain_token_has_a_finite_divergence():
    certain_BL, likely_BL = torch.zeros(1, 1), torch.full((1, 1), math.log(0.5))
    assert binary_divergence(certain_BL, certain_BL, divergence="kl").item() == 0.0
    assert 20 < binary_divergence(certain_BL, likely_BL, divergence="kl").item() < 100
