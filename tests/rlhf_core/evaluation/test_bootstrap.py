"""Intervals cover what they promise."""

from __future__ import annotations

import math
import random

import pytest

from rlhf_core.errors import DataError
from rlhf_core.evaluation.bootstrap import bootstrap_interval, win_rate

HOW = {"level": 0.95, "resamples": 1000, "seed": 3}


def test_equal_values_have_an_interval_of_no_width() -> None:
    assert bootstrap_interval([2.0] * 5, **HOW) == (2.0, 2.0, 2.0)


def test_the_interval_of_a_large_sample_is_that_of_the_normal_approximation() -> None:
    rng = random.Random(1)
    values = [rng.gauss(10, 2) for _ in range(2000)]
    mean, low, high = bootstrap_interval(values, level=0.95, resamples=4000, seed=3)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    half = 1.96 * spread / math.sqrt(len(values))  # 0.0877 for a spread of 2
    assert mean == pytest.approx(sum(values) / 2000)
    # The ends are quantiles of 4000 draws; their own error is about 0.002.
    assert low == pytest.approx(mean - half, abs=0.01)
    assert high == pytest.approx(mean + half, abs=0.01)


def test_ninety_five_of_a_hundred_intervals_hold_the_true_mean() -> None:
    rng = random.Random(2)
    held = 0
    for trial in range(200):
        _, low, high = bootstrap_interval(
            [rng.expovariate(1.0) for _ in range(80)], level=0.95, resamples=400, seed=trial
        )
        held += low <= 1.0 <= high
    # 190 expected; a binomial has a standard deviation of 3.1, and the percentile interval of a skewed sample is
    # known to be somewhat short (about 93 %).
    assert 176 <= held <= 198


def test_a_higher_level_is_a_wider_interval() -> None:
    values = [float(value % 7) for value in range(60)]
    narrow = bootstrap_interval(values, level=0.5, resamples=1000, seed=3)
    wide = bootstrap_interval(values, level=0.99, resamples=1000, seed=3)
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_the_same_seed_gives_the_same_interval() -> None:
    values = [0.1, 0.9, 0.4, 0.7]
    assert bootstrap_interval(values, **HOW) == bootstrap_interval(values, **HOW)


def test_a_large_sample_is_drawn_in_pieces_and_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [float(value) for value in range(100)]
    whole = bootstrap_interval(values, **HOW)
    monkeypatch.setattr("rlhf_core.evaluation.bootstrap._CHUNK", 100 * 7)  # 7 resamples at a time
    assert bootstrap_interval(values, **HOW) == whole


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_without_a_mean_are_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match="finite"):
        bootstrap_interval(values, **HOW)


def test_ties_count_half() -> None:
    assert win_rate([1.0, 2.0, 0.0, 5.0], [0.0, 2.0, 1.0, 4.0], **HOW).mean == (1 + 0.5 + 0 + 1) / 4
    assert win_rate([1.0] * 9, [1.0] * 9, **HOW) == (0.5, 0.5, 0.5)
