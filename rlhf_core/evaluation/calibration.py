"""Calibrate a reward model: fit a temperature on one half of the pairs, and measure its calibration on the other half.

A Bradley-Terry model says P(chosen is better) = sigmoid(margin / T). T = 1 is the model as it was trained; a model that is too
sure of itself has T > 1 (temperature scaling, Guo et al., arXiv 1706.04599).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf_core.evaluation.metrics import ReliabilityBin, calibration_error, reliability

LEVEL = 0.95
RESAMPLES = 1000
BINS = 20
"""Number of bins over [0, 1]; the probability of the higher-scored answer is in the upper half of them."""
FEWEST = 10
"""Fewest pairs in a half; with fewer, nothing is fitted."""
SHARPEST, FLATTEST = 1e-2, 1e3
"""Bounds of the temperature. A model that orders every pair right has no best temperature: sharper is always better."""


def calibration_report(margins: Sequence[float], *, seed: int) -> dict[str, Any] | None:
    """Return the fitted temperature, and the calibration error before and after it on pairs that were not fitted.

    `margins` are the scores of chosen answers less those of rejected ones. Errors have bootstrap intervals, and so has
    their difference, `ece_change`: below 0 the temperature helps. Returns None for fewer than 2 * `FEWEST` pairs.
    """
    order = list(range(len(margins)))
    random.Random(seed).shuffle(order)
    half = len(order) // 2
    if half < FEWEST:
        return None
    fitted = np.asarray([margins[i] for i in order[:half]], dtype=np.float64)
    others = np.asarray([margins[i] for i in order[half:]], dtype=np.float64)
    temperature = fit_temperature(fitted.tolist())
    before, after = _ece(others, 1.0), _ece(others, temperature)
    rng = np.random.default_rng(seed)
    samples = [others[rng.integers(0, others.size, size=others.size)] for _ in range(RESAMPLES)]
    drawn = np.asarray([(_ece(sample, 1.0), _ece(sample, temperature)) for sample in samples])
    return {
        "temperature": temperature,
        "at_bound": not SHARPEST * 1.01 < temperature < FLATTEST / 1.01,
        "fitted_pairs": half,
        "pairs": int(others.size),
        "ece_before": _interval(before, drawn[:, 0]),
        "ece_after": _interval(after, drawn[:, 1]),
        "ece_change": _interval(after - before, drawn[:, 1] - drawn[:, 0]),
        "reliability_after": [row._asdict() for row in confidence_bins(others / temperature)],
    }


def fit_temperature(margins: Sequence[float]) -> float:
    """Return the T that minimizes the mean of -log sigmoid(margin / T), between `SHARPEST` and `FLATTEST`.

    >>> round(fit_temperature([2.0, 2.0, 2.0, -2.0]), 3)  # three of four are right: sigmoid(2 / T) = 3/4
    1.82
    """
    values = np.asarray(margins, dtype=np.float64)
    if values.min() >= 0 or values.max() <= 0:  # a bound is best, and the loss may be flat before it
        return SHARPEST if values.min() >= 0 else FLATTEST
    from scipy.optimize import minimize_scalar  # half a second

    # In the logarithm of T, because it is a scale; the loss is convex in 1 / T, so it has one minimum.
    found = minimize_scalar(
        lambda log: float(np.logaddexp(0.0, -values * np.exp(-log)).mean()),
        bounds=(float(np.log(SHARPEST)), float(np.log(FLATTEST))),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(np.exp(found.x))


def confidence_bins(margins: Any) -> list[ReliabilityBin]:
    """Return bins over [0.5, 1] of sigmoid(|margin|) = P(the higher-scored answer is the chosen one). Ties count half."""
    values = np.asarray(margins, dtype=np.float64)
    sure = 1 / (1 + np.exp(-np.minimum(np.abs(values), 700.0)))
    return reliability(sure, (np.sign(values) + 1) / 2, bins=BINS)


# ---------------------------------------------------------------- private


def _ece(margins: Any, temperature: float) -> float:
    return calibration_error(confidence_bins(margins / temperature))


def _interval(value: float, drawn: Any) -> dict[str, float]:
    low, high = (float(np.quantile(drawn, side)) for side in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return {"value": float(value), "low": low, "high": high}
