"""Statistics against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from rlhf_core.evaluation.metrics import (
    best_of_n_kl,
    calibration_error,
    correlation,
    distinct_n,
    entropy_estimate,
    rank_correlation,
    reliability,
    repetition,
)


def test_distinct_counts_over_all_sequences() -> None:
    # ab bc | ab bd: three different of four
    assert distinct_n(["abc", "abd"], 2) == 0.75
    assert distinct_n(["a"], 2) == 0.0


def test_repetition_is_the_share_of_ngrams_seen_before() -> None:
    # abc bca cab abc: one of four came before
    assert repetition("abcabc", 3) == 0.25
    assert repetition("abcd", 3) == 0.0
    assert repetition("ab", 3) == 0.0


def test_entropy_of_a_fair_coin_is_log_two() -> None:
    assert entropy_estimate([[math.log(0.5)] * 3, [math.log(0.5)]]) == pytest.approx(math.log(2))
    assert entropy_estimate([[]]) == 0.0


def test_entropy_weighs_tokens_and_not_sequences() -> None:
    assert entropy_estimate([[-1.0, -1.0, -1.0], [-5.0]]) == 2.0


def test_the_bound_of_best_of_n() -> None:
    assert best_of_n_kl(1) == 0.0
    assert best_of_n_kl(8) == pytest.approx(1.2044415)  # ln 8 - 7/8


def test_correlation_of_a_line_is_one_and_of_a_constant_zero() -> None:
    assert correlation([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
    assert correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert correlation([1, 2, 3], [5, 5, 5]) == 0.0


def test_rank_correlation_sees_any_rising_curve_and_shares_ranks_of_ties() -> None:
    assert rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1.0)
    # ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 / sqrt(4.5 * 5)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_bins_hold_confidence_and_accuracy() -> None:
    rows = reliability([0.1, 0.15, 0.9, 1.0], [0.0, 1.0, 1.0, 1.0], bins=5)
    assert rows == [(0.0, 0.2, 2, 0.125, 0.5), (0.8, 1.0, 2, 0.95, 1.0)]
    # (2 * |0.5 - 0.125| + 2 * |1 - 0.95|) / 4
    assert calibration_error(rows) == pytest.approx(0.2125)


def test_a_calibrated_prediction_has_no_error() -> None:
    rows = reliability([0.75] * 4, [1.0, 1.0, 1.0, 0.0], bins=10)
    assert calibration_error(rows) == 0.0
    assert calibration_error([]) == 0.0
