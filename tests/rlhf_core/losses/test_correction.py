"""The sampler-trainer correction: three tokens with ratios 1/2, 2 and 8 in row 0, one with ratio 1 in row 1."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_core.errors import DataError
from rlhf_core.losses.correction import fraction_corrected, importance_weights, mismatch_metrics

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
