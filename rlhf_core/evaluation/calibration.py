"""Calibrate a reward model: fit a temperature on the pairs of one half of the prompts, and judge it on those of the other.

A Bradley-Terry model says P(chosen is better) = sigmoid(margin / T). T = 1 is the model as it was trained; a model that is too
sure of itself has T > 1 (temperature scaling, Guo et al., arXiv 1706.04599).
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from rlhf_core.evaluation.intervals import LEVEL
from rlhf_core.evaluation.metrics import ReliabilityBin, calibration_error, reliability

RESAMPLES = 1000
BINS = 20
"""Number of bins over [0, 1]; the probability of the higher-scored answer is in the upper half of them."""
FEWEST = 10
"""Fewest prompts in a half; with fewer, nothing is fitted."""
SHARPEST, FLATTEST = 1e-2, 1e3
"""Bounds of the temperature. A model that orders every pair right has no best temperature: sharper is always better."""


def calibration_report(margins: Sequence[float], *, prompts: Sequence[Hashable], seed: int) -> dict[str, Any] | None:
    """Return the fitted temperature, and the calibration error before and after it on prompts that were not fitted.

    `margins` are the scores of chosen answers less those of rejected ones, and `prompts` names the prompt of each: pairs of
    one prompt are alike, so they are in one half, and are resampled together. Errors have bootstrap intervals, and so has
    their difference, `ece_change`: below 0 the temperature helps. Returns None for fewer than 2 * `FEWEST` prompts.
    """
    order = list(dict.fromkeys(prompts))
    random.Random(seed).shuffle(order)
    half = len(order) // 2
    if half < FEWEST:
        return None
    place = {name: at for at, name in enumerate(order)}
    index = np.array([place[name] for name in prompts])
    values = np.asarray(margins, dtype=np.float64)
    fitted, others = values[index < half], values[index >= half]
    temperature = fit_temperature(fitted.tolist())
    before, after = _ece(others, 1.0), _ece(others, temperature)
    counts_RC = np.random.default_rng(seed).multinomial(
        len(order) - half, [1 / (len(order) - half)] * (len(order) - half), size=RESAMPLES
    )
    drawn = [_resampled_ece(others / t, index[index >= half] - half, counts_RC) for t in (1.0, temperature)]
    return {
        "temperature": temperature,
        "at_bound": not SHARPEST * 1.01 < temperature < FLATTEST / 1.01,
        "fitted_pairs": int(fitted.size),
        "pairs": int(others.size),
        "prompts": len(order) - half,
        "ece_before": _interval(before, drawn[0]),
        "ece_after": _interval(after, drawn[1]),
        "ece_change": _interval(after - before, drawn[1] - drawn[0]),
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
    return reliability(*_confidence(margins), bins=BINS)


# ---------------------------------------------------------------- private


def _ece(margins: Any, temperature: float) -> float:
    return calibration_error(confidence_bins(margins / temperature))


def _confidence(margins: Any) -> tuple[Any, Any]:
    """Return the probability that the higher-scored answer is the chosen one, and whether it is (ties half)."""
    values = np.asarray(margins, dtype=np.float64)
    return 1 / (1 + np.exp(-np.minimum(np.abs(values), 700.0))), (np.sign(values) + 1) / 2


def _resampled_ece(margins: Any, prompt: Any, counts_RC: Any) -> Any:
    """Return the calibration error of R resamples, of which each takes the pairs of C prompts so many times.

    A bin adds |sum of outcomes - sum of confidences|, divided by the number of all pairs: the definition of
    `calibration_error`, without a loop over resamples.
    """
    sure, outcome = _confidence(margins)
    gap_CB = np.zeros((counts_RC.shape[1], BINS))
    np.add.at(gap_CB, (prompt, np.minimum((sure * BINS).astype(int), BINS - 1)), outcome - sure)
    return np.abs(counts_RC @ gap_CB).sum(axis=1) / (counts_RC @ np.bincount(prompt, minlength=counts_RC.shape[1]))


def _interval(value: float, drawn: Any) -> dict[str, float]:
    low, high = (float(np.quantile(drawn, side)) for side in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return {"value": float(value), "low": low, "high": high}
