"""Compute a win rate that does not reward length, in the manner of AlpacaEval 2 (arXiv 2404.04475).

With p_i the judge's preference for our answer to prompt i (1 a win, 0.5 a tie, 0 a loss), a logistic regression fits
logit P(p_i) = theta + phi * tanh((len_i - len'_i) / std_i(len_i - len'_i)); the length-controlled win rate is what remains
without the length, sigmoid(theta). AlpacaEval's third term, the difficulty of each instruction, is estimated over a
leaderboard of models and is left out here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhf_core.evaluation.intervals import LEVEL, Interval, pseudo_prompts, t_quantile

RIDGE = (1e-2, 1e-1)
"""Penalties on theta^2 / 2 and phi^2 / 2: without them a policy that always wins has no finite estimate."""
NEWTON_STEPS = 30


def length_controlled(
    preferences: Sequence[float], lengths: Sequence[int], their_lengths: Sequence[int]
) -> dict[str, float]:
    """Return {mean, low, high, prompts} of the length-controlled win rate.

    The interval is that of a share in `evaluation.intervals`: pseudo-prompts, won and lost at equal lengths, are added to the
    regression, and the sandwich estimator gives the error of theta.
    """
    wins_N = np.asarray(preferences, dtype=np.float64)
    longer_N = np.asarray(lengths, dtype=np.float64) - np.asarray(their_lengths, dtype=np.float64)
    spread = float(longer_N.std())
    lengths_N = np.tanh(longer_N / spread) if spread > 0 else np.zeros(len(wins_N))
    mean = float(_sigmoid(_fitted(wins_N, lengths_N, np.ones(len(wins_N)))[0]))
    added = pseudo_prompts(LEVEL)
    low, high = _interval(
        np.append(wins_N, (1.0, 0.0)), np.append(lengths_N, (0.0, 0.0)), np.append(np.ones(len(wins_N)), (added, added))
    )
    return Interval(mean, min(low, mean), max(high, mean), len(wins_N)).plain()


def _interval(
    wins_N: NDArray[np.float64], lengths_N: NDArray[np.float64], weights_N: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the ends for sigmoid(theta), with the error of theta taken to the rate (delta method)."""
    theta, phi = _fitted(wins_N, lengths_N, weights_N)
    terms_N2 = np.stack([np.ones_like(lengths_N), lengths_N], axis=1)
    p_N = _sigmoid(terms_N2 @ np.array([theta, phi]))
    curve = (terms_N2 * (weights_N * p_N * (1 - p_N))[:, None]).T @ terms_N2 + np.diag(RIDGE)
    noise = (terms_N2 * (weights_N * (wins_N - p_N) ** 2)[:, None]).T @ terms_N2
    error = float(np.sqrt((np.linalg.inv(curve) @ noise @ np.linalg.inv(curve))[0, 0]))
    rate = float(_sigmoid(theta))
    half = t_quantile(LEVEL, float(weights_N.sum()) - 1) * rate * (1 - rate) * error
    return max(0.0, rate - half), min(1.0, rate + half)


def _fitted(
    wins_N: NDArray[np.float64], lengths_N: NDArray[np.float64], weights_N: NDArray[np.float64]
) -> tuple[float, float]:
    """Return theta and phi of the regression over N prompts with these weights, by Newton's method."""
    terms_N2 = np.stack([np.ones_like(lengths_N), lengths_N], axis=1)
    fitted = np.zeros(2)
    for _ in range(NEWTON_STEPS):
        p_N = _sigmoid(terms_N2 @ fitted)
        gradient = terms_N2.T @ (weights_N * (wins_N - p_N)) - np.array(RIDGE) * fitted
        curve = (terms_N2 * (weights_N * p_N * (1 - p_N))[:, None]).T @ terms_N2 + np.diag(RIDGE)
        # A step of at most 2: far from the optimum the curvature vanishes and Newton's own step would overshoot.
        fitted = fitted + np.clip(np.linalg.solve(curve, gradient), -2, 2)
    return float(fitted[0]), float(fitted[1])


def _sigmoid(x: NDArray[np.float64] | float) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -50, 50))))
