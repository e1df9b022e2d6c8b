"""Compute confidence intervals of means over prompts, in closed form.

The same values always have the same interval. The unit is the prompt: several values of one prompt are not independent,
so they are averaged and count as one. With v_c the mean of prompt c, p_c its share of all values, m = sum_c p_c v_c,
and z and t quantiles at the level:

- Values between bounds a and b, such as shares: two times z^2 / 2 pseudo-prompts are added, half of them at each bound, so
  that prompts which all agree do not make an interval of no width. For single answers this is the interval of Agresti and
  Coull ("Approximate is better than exact", 1998), for paired differences Bonett and Price's (2012), with t for z.
- Other means: Student's t, after Hall's transformation removes the skewness ("On the removal of skewness by
  transformation", 1992), without which the interval of few skewed rewards is too short. If all agree, their own size
  stands for the spread that they do not show: the interval is that of values between 0 and twice as much.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlhf_core.errors import DataError
from rlhf_core.types import FEWEST_PROMPTS

LEVEL = 0.95  # confidence level of all intervals except in `evaluate`, which has an option
SHARE, DIFFERENCE_OF_SHARES = (0.0, 1.0), (-1.0, 1.0)  # bounds of values


class Interval(NamedTuple):
    """A mean with the ends of its confidence interval, infinite where the values give none, and the number of prompts.

    >>> Interval(0.5, 0.4, 0.6, 30).low
    0.4
    """

    mean: float
    low: float
    high: float
    prompts: int

    def plain(self) -> dict[str, float]:
        """The fields for JSON; an unknown interval has no ends.

        >>> mean_interval([2.0]).plain()
        {'mean': 2.0, 'prompts': 1}
        """
        return {name: value for name, value in self._asdict().items() if math.isfinite(value)}


def mean_interval(
    values: Sequence[float],
    *,
    prompts: Sequence[Hashable] | None = None,
    weights: Sequence[float] | None = None,
    bounds: tuple[float, float] | None = None,
    level: float = LEVEL,
) -> Interval:
    """The mean of `values` and the interval that covers the true mean with probability `level`.

    `prompts` names the prompt of each value; without it every value has its own. `weights` has one weight per value,
    and `bounds` are the smallest and largest possible values. Without bounds, the interval is unknown for one prompt,
    for prompts that all have 0, and for fewer than `FEWEST_PROMPTS` prompts that all have another value: they do not
    show how far values are apart. Raises DataError without values.

    >>> [round(end, 2) for end in mean_interval([1.0] * 8, bounds=SHARE)]  # 8 of 8 are right
    [1.0, 0.6, 1.0, 8]
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        rule, remedy = "must be at least one number, all of them finite", "leave out failed samples"
        raise DataError("values", list(values)[:5], rule, remedy)
    shares_C, means_C = _by_prompt(numbers, prompts, weights)
    mean, count = float(np.average(numbers, weights=weights)), len(means_C)
    agree = bool(np.ptp(means_C) <= 1e-9 * abs(mean))
    if bounds is None and agree and mean and count >= FEWEST_PROMPTS:
        bounds = (min(0.0, 2 * mean), max(0.0, 2 * mean))
    if bounds is not None:
        low, high = _bounded(shares_C, means_C, mean, bounds, level)
    elif count < 2 or agree:
        low, high = -math.inf, math.inf
    else:
        low, high = _unbounded(shares_C, means_C, mean, level)
    return Interval(mean, min(low, mean), max(high, mean), count)


def ends(value: Mapping[str, float]) -> tuple[float, float]:
    """The ends of a mean as `Interval.plain` wrote it; the mean itself if no interval is known.

    >>> ends({"mean": 2.0, "prompts": 1})
    (2.0, 2.0)
    """
    return (value["low"], value["high"]) if "low" in value else (value["mean"], value["mean"])


def bounds_of(values: Sequence[float]) -> tuple[float, float] | None:
    """The bounds of a share if all values are 0 or 1, else None: a reward on an unknown scale.

    >>> bounds_of([0.0, 1.0]), bounds_of([0.0, 3.5])
    ((0.0, 1.0), None)
    """
    return SHARE if set(values) <= {0.0, 1.0} else None


def difference_bounds(
    ours: tuple[float, float] | None, theirs: tuple[float, float] | None
) -> tuple[float, float] | None:
    """The bounds of the difference of two values with these bounds."""
    return DIFFERENCE_OF_SHARES if ours == theirs == SHARE else None


def t_quantile(level: float, freedom: float) -> float:
    """The number of standard errors that an interval of Student's t reaches to either side."""
    from scipy.special import stdtrit  # a part of a second, which commands without intervals need not wait

    return float(stdtrit(freedom, (1 + level) / 2))


def pseudo_prompts(level: float) -> float:
    """The number of pseudo-prompts that are added at each bound: z^2 / 2.

    >>> round(pseudo_prompts(0.95), 2)
    1.92
    """
    return t_quantile(level, math.inf) ** 2 / 2  # t with infinite freedom is z


# ---------------------------------------------------------------- arrays; C prompts


def _by_prompt(
    numbers: NDArray[np.float64], prompts: Sequence[Hashable] | None, weights: Sequence[float] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each prompt's share of the weight of all values, and the mean of its values."""
    names = range(len(numbers)) if prompts is None else prompts
    place = {name: at for at, name in enumerate(dict.fromkeys(names))}
    index = np.array([place[name] for name in names])
    weighted = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=np.float64)
    totals_C = np.bincount(index, weighted)
    return totals_C / totals_C.sum(), np.bincount(index, weighted * numbers) / totals_C


def _bounded(
    shares_C: NDArray[np.float64], means_C: NDArray[np.float64], mean: float, bounds: tuple[float, float], level: float
) -> tuple[float, float]:
    lowest, highest = bounds
    added = pseudo_prompts(level)
    effective = _effective(shares_C)
    total = effective + 2 * added  # n + z^2
    center = (effective * mean + added * (lowest + highest)) / total
    spread = effective**2 * float(shares_C**2 @ (means_C - center) ** 2)
    spread += added * ((lowest - center) ** 2 + (highest - center) ** 2)
    half = t_quantile(level, total - 1) * math.sqrt(spread) / total  # t s / sqrt(n), with s^2 = spread / n
    return max(lowest, center - half), min(highest, center + half)


def _unbounded(
    shares_C: NDArray[np.float64], means_C: NDArray[np.float64], mean: float, level: float
) -> tuple[float, float]:
    count = len(means_C)
    # A mean is nearer to a prompt the more it weighs: the errors are scaled as in HC2 (MacKinnon and White 1985).
    errors_C = count * shares_C * (means_C - mean) * np.sqrt((1 - 1 / count) / (1 - shares_C))
    variance = float(errors_C @ errors_C) / count
    error, reach = math.sqrt(variance / (count - 1)), t_quantile(level, max(1.0, _effective(shares_C) - 1))
    skewness = float((errors_C**3).mean()) / variance**1.5  # m3 / m2^(3/2)
    high, low = (_unskewed(side * reach, skewness, count) for side in (-1, 1))
    return mean - error * low, mean - error * high


def _effective(shares_C: NDArray[np.float64]) -> float:
    """The number of prompts if all have the same share of the values, else fewer (Kish 1965)."""
    return 1 / float(shares_C @ shares_C)  # n_eff = 1 / sum_c p_c^2


def _unskewed(t: float, skewness: float, count: int) -> float:
    """Hall's inverse of t + s t^2 / (3 sqrt n) + s^2 t^3 / (27 n) + s / (6 sqrt n), for skewness s of n values."""
    root = math.sqrt(count)
    if abs(skewness) < 1e-6:
        return t
    return 3 * root / skewness * (math.cbrt(1 + skewness / root * (t - skewness / (6 * root))) - 1)
