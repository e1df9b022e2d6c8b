"""The length-controlled win rate against what made the preferences."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.evaluation.intervals import SHARE, mean_interval
from rlhf_core.suites.results import length_controlled


def preferences(theta: float, phi: float, lengths: np.ndarray, others: np.ndarray) -> np.ndarray:
    longer = lengths - others
    chance = 1 / (1 + np.exp(-(theta + phi * np.tanh(longer / longer.std()))))
    return (np.random.default_rng(3).random(len(lengths)) < chance).astype(float)


def test_what_length_alone_wins_is_taken_away() -> None:
    rng = np.random.default_rng(1)
    others = rng.integers(100, 400, size=3000)
    lengths = others + rng.integers(0, 300, size=3000)  # never shorter
    wins = preferences(0.0, 2.0, lengths, others)  # equally good, and the judge loves length
    found = length_controlled(list(wins), list(lengths), list(others))
    assert wins.mean() > 0.75
    assert found["low"] < 0.5 < found["high"] and found["mean"] == pytest.approx(0.5, abs=0.06)


def test_without_an_effect_of_length_it_is_the_plain_win_rate() -> None:
    rng = np.random.default_rng(2)
    others, lengths = rng.integers(50, 90, size=800), rng.integers(50, 90, size=800)
    wins = preferences(1.0, 0.0, lengths, others)
    found = length_controlled(list(wins), list(lengths), list(others))
    assert found["mean"] == pytest.approx(wins.mean(), abs=0.01)


@pytest.mark.parametrize(("win", "lengths"), [(1.0, [5, 5, 5]), (0.0, [9, 5, 1]), (0.5, [1, 2, 3])])
def test_a_policy_that_always_wins_loses_or_ties_has_a_finite_rate(win: float, lengths: list[int]) -> None:
    found = length_controlled([win] * 3, lengths, [5, 5, 5])
    assert found["mean"] == pytest.approx(win, abs=0.03)
    assert 0 <= found["low"] < found["high"] - 0.4 <= 0.6  # three prompts show little


def test_without_lengths_its_interval_is_that_of_a_share() -> None:
    wins = [1.0] * 11 + [0.0] * 4 + [0.5]
    plain = mean_interval(wins, bounds=SHARE)
    found = length_controlled(wins, [5] * 16, [5] * 16)
    # The ridge on theta, 1e-2 against a curvature of 4, and a tie, which the sandwich counts as a spread of 0, are all.
    assert (found["low"], found["high"]) == pytest.approx(plain[1:3], abs=0.01)


@pytest.mark.parametrize(("prompts", "theta"), [(12, 2.0), (60, 0.5)])
def test_ninety_five_of_a_hundred_intervals_cover_the_rate(prompts: int, theta: float) -> None:
    rng, covered, trials = np.random.default_rng(prompts), 0, 300
    for _ in range(trials):
        lengths, others = rng.integers(50, 90, size=(2, prompts))
        longer = lengths - others
        chance = 1 / (1 + np.exp(-(theta + np.tanh(longer / longer.std()))))
        found = length_controlled(list((rng.random(prompts) < chance).astype(float)), list(lengths), list(others))
        covered += found["low"] <= 1 / (1 + np.exp(-theta)) <= found["high"]
    assert covered / trials >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / trials)  # 0.912
