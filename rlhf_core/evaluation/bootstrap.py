"""Compute confidence intervals by the percentile bootstrap (Efron 1979), which resamples values with replacement.

The values of the arguments are resampled independently. Several samples of one prompt are not independent, so average
them first and pass one value per prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import DataError, explain

_CHUNK = 2**22
"""Maximum number of indices drawn at a time (32 MiB)."""


class Interval(NamedTuple):
    """A mean with the ends of its confidence interval.

    >>> Interval(0.5, 0.4, 0.6).low
    0.4
    """

    mean: float
    low: float
    high: float


def bootstrap_interval(values: Sequence[float], *, level: float, resamples: int, seed: int) -> Interval:
    """Return the mean of `values` and the interval that covers the true mean with probability `level`.

    >>> bootstrap_interval([2.0, 2.0, 2.0], level=0.95, resamples=100, seed=1)
    Interval(mean=2.0, low=2.0, high=2.0)
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        raise DataError(
            explain(
                "values",
                list(values)[:5],
                "must be at least one number, all of them finite",
                "leave out failed samples",
            )
        )
    pieces = resampled_indices(numbers.size, resamples=resamples, seed=seed)
    means = np.concatenate([numbers[index].mean(axis=1) for index in pieces])
    low, high = (float(np.quantile(means, side)) for side in ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(numbers.mean()), low, high)


def resampled_indices(count: int, *, resamples: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield `resamples` rows of `count` indices drawn with replacement, in pieces that fit into memory."""
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // count)
    for start in range(0, resamples, rows):
        yield rng.integers(0, count, size=(min(rows, resamples - start), count))


def win_rate(ours: Sequence[float], theirs: Sequence[float], *, level: float, resamples: int, seed: int) -> Interval:
    """Return the fraction of pairs on the same prompts in which ours is higher. A tie counts half.

    >>> win_rate([1.0, 2.0], [0.0, 2.0], level=0.95, resamples=100, seed=1).mean
    0.75
    """
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in zip(ours, theirs, strict=True)]
    return bootstrap_interval(wins, level=level, resamples=resamples, seed=seed)
