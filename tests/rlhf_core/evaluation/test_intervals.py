"""Intervals cover what they promise, with few prompts, several answers to a prompt, and skewed rewards."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from rlhf_core.errors import DataError
from rlhf_core.evaluation.intervals import DIFFERENCE_OF_SHARES, SHARE, bounds_of, difference_bounds, mean_interval
from rlhf_core.types import FEWEST_PROMPTS

TRIALS = 1000
ERROR = 3 * math.sqrt(0.95 * 0.05 / TRIALS)  # three standard deviations of a coverage of 95 % in so many trials: 0.021
Drawn = tuple[NDArray[np.float64], list[int] | None]


def answers(prompts: int, each: int, mean: float, alike: float) -> Callable[[np.random.Generator], Drawn]:
    """Right or wrong answers, several to a prompt, correlated by `alike`: the chance of each prompt is beta distributed."""
    size = 1 / alike - 1
    names = list(np.repeat(range(prompts), each))

    def draw(rng: np.random.Generator) -> Drawn:
        chances = rng.beta(mean * size, (1 - mean) * size, prompts)
        return (rng.random((prompts, each)) < chances[:, None]).astype(float).ravel(), names

    return draw


def unequal(rng: np.random.Generator) -> Drawn:
    """Pairs of a reward model: some prompts have one, some many; the accuracy differs from prompt to prompt."""
    counts, chances = rng.geometric(0.3, 30), rng.beta(2, 1, 30)
    return (rng.random(counts.sum()) < np.repeat(chances, counts)).astype(float), list(np.repeat(range(30), counts))


def uneven_rewards(rng: np.random.Generator) -> Drawn:
    """Rewards whose mean differs from prompt to prompt, of 1 to 8 answers each."""
    counts = rng.integers(1, 9, 6)
    return np.repeat(rng.normal(0, 1, 6), counts) + rng.normal(0, 1, counts.sum()), list(np.repeat(range(6), counts))


def draws(values: Callable[[np.random.Generator], NDArray[np.float64]]) -> Callable[[np.random.Generator], Drawn]:
    return lambda rng: (values(rng).astype(float), None)


def difference(up: float, down: float, prompts: int) -> Callable[[np.random.Generator], Drawn]:
    return draws(lambda rng: rng.choice([1.0, 0.0, -1.0], prompts, p=[up, 1 - up - down, down]))


# The true mean, the bounds, and how far below 95 % the method may be beyond the error of the simulation: Hall's
# transformation takes off the first order of the skewness, of which an exponential distribution has 2 and n = 8 is few.
COVERED = {
    "8 prompts, nearly all right": (draws(lambda rng: rng.random(8) < 0.98), 0.98, SHARE, 0.0),
    "8 prompts, half right": (draws(lambda rng: rng.random(8) < 0.5), 0.5, SHARE, 0.0),
    "one prompt": (draws(lambda rng: rng.random(1) < 0.98), 0.98, SHARE, 0.0),
    "100 prompts": (draws(lambda rng: rng.random(100) < 0.8), 0.8, SHARE, 0.0),
    "7 answers each, alike": (answers(20, 7, 0.7, 0.5), 0.7, SHARE, 0.0),
    "7 answers each, nearly all right": (answers(8, 7, 0.98, 0.9), 0.98, SHARE, 0.0),
    "7 answers each, independent": (answers(20, 7, 0.7, 1e-3), 0.7, SHARE, 0.0),
    "unequal numbers of pairs": (unequal, 2 / 3, SHARE, 0.0),
    "difference of two that agree": (difference(0.02, 0.0, 8), 0.02, DIFFERENCE_OF_SHARES, 0.0),
    "difference of two that do not": (difference(0.3, 0.2, 20), 0.1, DIFFERENCE_OF_SHARES, 0.0),
    "8 prompts, nearly all rated best": (draws(lambda rng: rng.choice([5, 1], 8, p=[0.9, 0.1])), 4.6, None, 0.0),
    "8 prompts, nearly all punished": (draws(lambda rng: rng.choice([-1, 1], 8, p=[0.98, 0.02])), -0.96, None, 0.0),
    "normal rewards, unequal numbers of answers": (uneven_rewards, 0.0, None, 0.0),
    "normal rewards": (draws(lambda rng: rng.normal(3, 2, 8)), 3.0, None, 0.0),
    "skewed rewards, 8 prompts": (draws(lambda rng: rng.exponential(1, 8)), 1.0, None, 0.015),
    "skewed rewards, 50 prompts": (draws(lambda rng: rng.exponential(1, 50)), 1.0, None, 0.0),
}


@pytest.mark.parametrize("case", COVERED)
def test_ninety_five_of_a_hundred_intervals_cover_the_true_mean(case):
    draw, truth, bounds, short = COVERED[case]
    rng = np.random.default_rng(list(COVERED).index(case))
    covered = 0
    for _ in range(TRIALS):
        values, prompts = draw(rng)
        found = mean_interval(values.tolist(), prompts=prompts, bounds=bounds)
        covered += found.low <= truth <= found.high
    assert covered / TRIALS >= 0.95 - short - ERROR


def test_for_single_answers_it_is_the_interval_of_agresti_and_coull_with_t_for_z():
    added = stats.norm.ppf(0.975) ** 2 / 2
    total, right = 40 + 2 * added, 31 + added
    half = stats.t.ppf(0.975, total - 1) * math.sqrt(right / total * (1 - right / total) / total)
    found = mean_interval([1.0] * 31 + [0.0] * 9, bounds=SHARE)
    assert found == pytest.approx((31 / 40, right / total - half, right / total + half, 40))


def test_without_skewness_it_is_students_t_as_scipy_has_it():
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    low, high = stats.t.interval(0.9, 6, loc=4, scale=stats.sem(values))
    assert mean_interval(values, level=0.9) == pytest.approx((4.0, low, high, 7))


def test_a_skewed_sample_reaches_further_to_where_its_tail_is():
    low, high = stats.t.interval(0.95, 9, loc=1, scale=stats.sem([0.0] * 9 + [10.0]))
    found = mean_interval([0.0] * 9 + [10.0])
    assert found.high - 1 > high - 1 and 1 - found.low < 1 - low


def test_the_values_of_a_prompt_count_as_one_and_weights_are_their_number():
    values, prompts = [1.0, 1.0, 0.0, 1.0, 0.5], ["a", "a", "b", "b", "c"]
    by_hand = mean_interval([1.0, 0.5, 0.5], weights=[2.0, 2.0, 1.0], bounds=SHARE)
    assert mean_interval(values, prompts=prompts, bounds=SHARE) == pytest.approx(by_hand)
    assert (by_hand.mean, by_hand.prompts) == (pytest.approx(0.7), 3)


@pytest.mark.parametrize(
    ("values", "known"),
    [([1.5], False), ([2.0] * (FEWEST_PROMPTS - 1), False), ([2.0] * FEWEST_PROMPTS, True), ([0.0] * 99, False)],
)
def test_what_prompts_do_not_show_is_no_interval(values, known):
    found = mean_interval(values)
    assert math.isfinite(found.low) is math.isfinite(found.high) is known
    assert ("low" in found.plain()) is known


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_values_without_a_mean_are_refused(values):
    with pytest.raises(DataError, match="finite"):
        mean_interval(values)


def test_only_right_and_wrong_make_a_share():
    assert bounds_of([1.0, 1.0]) == bounds_of([0.0]) == SHARE and bounds_of([0.5, 1.0]) is None
    assert difference_bounds(SHARE, SHARE) == DIFFERENCE_OF_SHARES and difference_bounds(SHARE, None) is None
