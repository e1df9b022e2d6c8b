"""The length-controlled win rate against what made the preferences."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.suites.win_rate import length_controlled


def preferences(theta: float, phi: float, lengths: np.ndarray, others: np.ndarray) -> np.ndarray:
    longer = lengths - others
    chance = 1 / (1 + np.exp(-(theta + phi * np.tanh(longer / longer.std()))))
    return (np.random.default_rng(3).random(len(lengths)) < chance).astype(float)


def test_what_length_alone_wins_is_taken_away() -> None:
    rng = np.random.default_rng(1)
    others = rng.integers(100, 400, size=3000)
    lengths = others + rng.integers(0, 300, size=3000)  # never shorter
    wins = preferences(0.0, 2.0, lengths, others)  # equally good, and the judge loves length
    found = length_controlled(list(wins), list(lengths), list(others), seed=4)
    assert wins.mean() > 0.75
    assert found["low"] < 0.5 < found["high"] and found["mean"] == pytest.approx(0.5, abs=0.06)


def test_without_an_effect_of_length_it_is_the_plain_win_rate() -> None:
    rng = np.random.default_rng(2)
    others, lengths = rng.integers(50, 90, size=800), rng.integers(50, 90, size=800)
    wins = preferences(1.0, 0.0, lengths, others)
    found = length_controlled(list(wins), list(lengths), list(others), seed=4)
    assert found["mean"] == pytest.approx(wins.mean(), abs=0.01)


@pytest.mark.parametrize(("win", "lengths"), [(1.0, [5, 5, 5]), (0.0, [9, 5, 1]), (0.5, [1, 2, 3])])
def test_a_policy_that_always_wins_loses_or_ties_has_a_finite_rate(win: float, lengths: list[int]) -> None:
    found = length_controlled([win] * 3, lengths, [5, 5, 5], seed=1)
    assert found["mean"] == pytest.approx(win, abs=0.03)
    assert 0 <= found["low"] <= found["high"] <= 1
