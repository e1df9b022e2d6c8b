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

from rlhf_core.evaluation.bootstrap import resampled_indices
from rlhf_core.suites.results import LEVEL, RESAMPLES

RIDGE = (1e-2, 1e-1)
"""Penalties on theta^2 / 2 and phi^2 / 2: without them a policy that always wins has no finite estimate."""
NEWTON_STEPS = 30


def length_controlled(
    preferences: Sequence[float], lengths: Sequence[int], their_lengths: Sequence[int], *, seed: int
) -> dict[str, float]:
    """Return {mean, low, high, prompts} of the length-controlled win rate, with its bootstrap interval over prompts."""
    wins = np.asarray(preferences, dtype=np.float64)
    longer = np.asarray(lengths, dtype=np.float64) - np.asarray(their_lengths, dtype=np.float64)
    spread = float(longer.std())
    lengths_1N = np.tanh(longer / spread)[None] if spread > 0 else np.zeros((1, len(wins)))
    centre = float(_rates(wins[None], lengths_1N)[0])
    pieces = resampled_indices(len(wins), resamples=RESAMPLES, seed=seed)
    resampled = np.concatenate([_rates(wins[index], lengths_1N[0][index]) for index in pieces])
    low, high = (float(np.quantile(resampled, (1 + side * LEVEL) / 2)) for side in (-1, 1))
    return {"mean": centre, "low": low, "high": high, "prompts": float(len(wins))}


def _rates(wins_RN: NDArray[np.float64], lengths_RN: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sigmoid(theta) of each of R regressions over N prompts, by Newton's method."""
    theta_R = np.zeros(len(wins_RN))
    phi_R = np.zeros(len(wins_RN))
    for _ in range(NEWTON_STEPS):
        p_RN = _sigmoid(theta_R[:, None] + phi_R[:, None] * lengths_RN)
        error_RN, curve_RN = wins_RN - p_RN, p_RN * (1 - p_RN)
        gradient = (error_RN.sum(1) - RIDGE[0] * theta_R, (error_RN * lengths_RN).sum(1) - RIDGE[1] * phi_R)
        a = curve_RN.sum(1) + RIDGE[0]
        b = (curve_RN * lengths_RN).sum(1)
        d = (curve_RN * lengths_RN**2).sum(1) + RIDGE[1]
        determinant = a * d - b * b
        # A step of at most 2: far from the optimum the curvature vanishes and Newton's own step would overshoot.
        theta_R = theta_R + np.clip((d * gradient[0] - b * gradient[1]) / determinant, -2, 2)
        phi_R = phi_R + np.clip((a * gradient[1] - b * gradient[0]) / determinant, -2, 2)
    return _sigmoid(theta_R)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -50, 50))))
