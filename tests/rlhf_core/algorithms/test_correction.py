"""The sampler-trainer correction: three tokens with ratios 1/2, 2 and 8 in row 0, one with ratio 1 in row 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.algorithms.token_math import CorrectionConfig, fraction_corrected, importance_weights, mismatch_metrics
from rlhf_core.errors import DataError
from rlhf_core.schema.base import keyed

OLD_BL = torch.tensor([[0.5, 2.0, 8.0, 9.0], [1.0, 9.0, 9.0, 9.0]]).log()
ROLLOUT_BL = torch.zeros(2, 4)
MASK_BL = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
WINDOW: dict[str, Any] = {"cap": 5.0, "low": 0.75}


def weights(level: str, mode: str) -> list[float]:
    result_BL = importance_weights(OLD_BL, ROLLOUT_BL, MASK_BL, level=level, mode=mode, **WINDOW)  # type: ignore[arg-type]
    return result_BL.flatten().tolist()


def test_off_weighs_every_trained_token_one() -> None:
    assert weights("off", "truncate") == [1, 1, 1, 0, 1, 0, 0, 0]


def test_truncation_caps_large_ratios_and_keeps_small_ones() -> None:
    assert weights("token", "truncate") == pytest.approx([0.5, 2, 5, 0, 1, 0, 0, 0], rel=1e-6)


def test_masking_drops_ratios_outside_the_window() -> None:
    assert weights("token", "mask") == pytest.approx([0, 2, 0, 0, 1, 0, 0, 0], rel=1e-6)


def test_the_sequence_level_takes_the_product_of_the_ratios() -> None:
    assert weights("sequence", "truncate") == pytest.approx([5, 5, 5, 0, 1, 0, 0, 0], rel=1e-6)  # min(8, 5)
    assert weights("sequence", "mask") == pytest.approx([0, 0, 0, 0, 1, 0, 0, 0], rel=1e-6)


def test_the_geometric_level_takes_their_geometric_mean() -> None:
    assert weights("geometric", "mask") == pytest.approx([2, 2, 2, 0, 1, 0, 0, 0], rel=1e-6)  # 8 ** (1/3)


def test_the_weights_carry_no_gradient() -> None:
    old_BL = OLD_BL.clone().requires_grad_(True)
    assert not importance_weights(old_BL, ROLLOUT_BL, MASK_BL, level="token", mode="truncate", **WINDOW).requires_grad


@pytest.mark.parametrize(
    ("level", "mode", "fraction"),
    [("token", "truncate", 0.25), ("token", "mask", 0.5), ("sequence", "mask", 0.75), ("off", "mask", 0.0)],
)
def test_the_fraction_corrected_counts_trained_tokens(level: str, mode: str, fraction: float) -> None:
    assert fraction_corrected(OLD_BL, ROLLOUT_BL, MASK_BL, level=level, mode=mode, **WINDOW) == fraction  # type: ignore[arg-type]


def test_the_mismatch_metrics_match_hand_computed_numbers() -> None:
    metrics = mismatch_metrics(OLD_BL, ROLLOUT_BL, MASK_BL)
    log2 = math.log(2)
    assert metrics["log_q_mean"] == pytest.approx((1 + 1 + 3 + 0) * log2 / 4, rel=1e-6)
    assert metrics["log_q_max"] == pytest.approx(3 * log2, rel=1e-6)
    assert metrics["exp_abs_log_q"] == pytest.approx((2 + 2 + 8 + 1) / 4, rel=1e-6)
    assert metrics["k3"] == pytest.approx(sum(q - 1 - math.log(q) for q in (0.5, 2, 8, 1)) / 4, rel=1e-6)
    assert metrics["ess"] == pytest.approx(11.5**2 / (4 * (0.25 + 4 + 64 + 1)), rel=1e-6)
    assert metrics["correlation"] == 0.0  # the sampler's probabilities are constant


def test_the_correlation_is_that_of_the_probabilities() -> None:
    old_BL, rollout_BL = torch.tensor([[0.2, 0.4, 0.9]]).log(), torch.tensor([[0.1, 0.5, 0.8]]).log()
    # deviations (-0.3, -0.1, 0.4) and (-11, 1, 10)/30: 1/30 * (3.3 - 0.1 + 4) / sqrt(0.26 * 222/900)
    expected = 7.2 / 30 / math.sqrt(0.26 * 222 / 900)
    assert mismatch_metrics(old_BL, rollout_BL, torch.ones(1, 3))["correlation"] == pytest.approx(expected, rel=1e-5)


def test_agreement_is_reported_as_exactly_none() -> None:
    metrics = mismatch_metrics(OLD_BL, OLD_BL.clone(), MASK_BL)
    assert metrics == {"log_q_mean": 0, "log_q_max": 0, "exp_abs_log_q": 1, "k3": 0, "ess": 1, "correlation": 1}


def test_a_batch_without_trained_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="selects no token"):
        mismatch_metrics(OLD_BL, ROLLOUT_BL, torch.zeros(2, 4))


def slow_weights(old: list[float], rollout: list[float], level: str, mode: str) -> list[float]:
    """The weights of one row's trained tokens, in Python floats; window [0.75, 5]."""
    logs = [a - b for a, b in zip(old, rollout, strict=True)]
    if level == "sequence":
        logs = [sum(logs)] * len(logs)
    if level == "geometric":
        logs = [sum(logs) / len(logs)] * len(logs)
    ratios = [math.exp(x) for x in logs]
    return [min(q, 5.0) if mode == "truncate" else q * (0.75 <= q <= 5.0) for q in ratios]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_and_their_fraction_match_a_slow_loop_whatever_stands_outside_the_mask(level: Any, mode: Any) -> None:
    generator = torch.Generator().manual_seed(16)
    old_BL, rollout_BL = (torch.randn(6, 8, generator=generator) - 2 for _ in range(2))
    mask_BL = torch.rand(6, 8, generator=generator) > 0.4
    mask_BL[2] = False
    dirty = [torch.where(mask_BL, x, float("nan")) for x in (old_BL, rollout_BL)]
    weights_BL = importance_weights(*dirty, mask_BL, level=level, mode=mode, **WINDOW)
    assert bool((weights_BL[~mask_BL] == 0).all())
    expected: list[float] = []
    for b in range(6):
        at = mask_BL[b]
        expected += slow_weights(old_BL[b, at].tolist(), rollout_BL[b, at].tolist(), level, mode) if at.any() else []
    assert weights_BL[mask_BL].tolist() == pytest.approx(expected, rel=1e-5)
    corrected = sum(w == 5.0 if mode == "truncate" else w == 0.0 for w in expected) / len(expected)
    assert fraction_corrected(*dirty, mask_BL, level=level, mode=mode, **WINDOW) == pytest.approx(corrected)


def test_the_mismatch_metrics_do_not_see_outside_the_mask() -> None:
    dirty = [torch.where(MASK_BL != 0, x, float("nan")) for x in (OLD_BL, ROLLOUT_BL)]
    assert mismatch_metrics(*dirty, MASK_BL) == mismatch_metrics(OLD_BL, ROLLOUT_BL, MASK_BL)


def test_a_mask_of_sequences_may_weigh_the_tokens_that_it_keeps_one_by_one() -> None:
    # geometric means: exp((0.6 - 0.2) / 2) = 1.22 is kept, exp(-2) = 0.14 is not
    old_BL, rollout_BL = torch.tensor([[0.6, -0.2], [-2.0, -2.0]]), torch.zeros(2, 2)
    ones_BL = torch.ones(2, 2)
    window = {"level": "geometric", "mode": "mask", "cap": 5.0, "low": 0.5}
    weights_BL = importance_weights(old_BL, rollout_BL, ones_BL, token_cap=1.5, **window)  # type: ignore[arg-type]
    assert weights_BL[0].tolist() == pytest.approx([1.5, math.exp(-0.2)], rel=1e-6)
    assert weights_BL[1].tolist() == [0.0, 0.0]
    whole_BL = importance_weights(old_BL, rollout_BL, ones_BL, **window)  # type: ignore[arg-type]
    assert whole_BL[0].tolist() == pytest.approx([math.exp(0.2)] * 2, rel=1e-6)
    assert fraction_corrected(old_BL, rollout_BL, ones_BL, token_cap=1.5, **window) == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [{"mode": "truncate", "level": "geometric"}, {"mode": "mask", "level": "token"}])
def test_a_cap_of_tokens_needs_a_mask_of_sequences(other: Any) -> None:
    with pytest.raises(ValidationError, match=r"token_cap = 2\.0: applies to mode = 'mask'"):
        CorrectionConfig(token_cap=2.0, **other)
    assert "token_cap" not in keyed(CorrectionConfig()), "results from before the option keep their keys"
