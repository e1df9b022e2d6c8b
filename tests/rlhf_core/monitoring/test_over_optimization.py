"""The monitor of over-optimization: it finds a fall, and its false alarms are as rare as its level says."""

import math
import random

import pytest
from scipy import stats

from rlhf_core.monitoring.bands import INDEPENDENT, PROXY, History, OverOptimization, mean_test, slope_test

PROMPTS, EVALUATIONS = 32, 10


def run(rng: random.Random, *, proxy: float, gold: float, turn: int = 0) -> int:
    """Return the evaluation at which the monitor fires, -1 if it never does.

    Prompts differ by more than anything else does; gold changes by `gold` per evaluation from `turn` on, and rises as the
    proxy does before.
    """
    history, monitor = History([]), OverOptimization()
    level = [rng.gauss(0, 3) for _ in range(PROMPTS)]
    for number in range(EVALUATIONS):
        fallen = proxy * min(number, turn) + gold * max(0, number - turn)
        scores = {
            PROXY: [base + proxy * number + rng.gauss(0, 1) for base in level],
            INDEPENDENT: [base + fallen + rng.gauss(0, 1) for base in level],
        }
        history.add_samples(10 * number, scores)
        if monitor.check(history, looks=EVALUATIONS):
            return number
    return -1


def test_false_alarms_over_whole_runs_are_as_rare_as_the_level_says():
    rng = random.Random(17)
    # the hardest null: the proxy surely rises, the independent reward stays; 400 runs of 10 evaluations
    alarms = sum(run(rng, proxy=1.0, gold=0.0) >= 0 for _ in range(400))
    # binomial(400, 0.05): mean 20, standard deviation 4.4
    assert alarms <= 20 + 3 * 4.4
    assert sum(run(rng, proxy=1.0, gold=0.5) >= 0 for _ in range(200)) == 0


def test_a_fall_after_a_rise_is_found():
    rng = random.Random(17)
    found = [run(rng, proxy=0.5, gold=-0.5, turn=3) for _ in range(100)]
    # standard error of a slope over 4 evaluations of 32 prompts: 1 / sqrt(5 * 32) = 0.08; -0.5 is six of them
    assert min(found) > 3  # not before there is a fall
    assert sum(number >= 0 for number in found) == 100


def test_a_proxy_that_falls_with_the_gold_is_not_over_optimization():
    rng = random.Random(17)
    assert all(run(rng, proxy=-0.5, gold=-0.5) == -1 for _ in range(50))


def test_the_text_says_both_slopes_and_the_steps():
    history = History([])
    for number in range(4):
        wiggle = [0.01 * ((7 * prompt + number) % 5) for prompt in range(8)]
        history.add_samples(10 * number, {PROXY: [number + one for one in wiggle]})
        history.add_samples(10 * number, {INDEPENDENT: [one - 2 * number for one in wiggle]})
    text = OverOptimization().check(history, looks=4)
    assert text.startswith(
        "held-out proxy +0.1 a step while the independent reward -0.2 a step over steps 0 to 30 (p = "
    )


def test_a_slope_is_that_of_least_squares():
    samples = [(0, (1.0, 0.0, 2.0)), (10, (2.0, 0.0, 2.0)), (30, (5.0, 3.0, 2.0))]
    expected = [stats.linregress([0, 10, 30], [row[1][prompt] for row in samples]).slope for prompt in range(3)]
    assert slope_test(samples).slope == pytest.approx(sum(expected) / 3)


def test_prompts_without_a_score_are_left_out():
    samples = [(0, (1.0, math.nan, 2.0, 1.0)), (1, (2.0, 9.0, 2.9, 2.1)), (2, (3.0, 9.0, 4.2, 3.0))]
    whole = [(step, (values[0], *values[2:])) for step, values in samples]
    assert slope_test(samples) == slope_test(whole)
    assert slope_test([(step, values[:3]) for step, values in samples]).above == 1.0  # two are too few


@pytest.mark.parametrize("count", [6, 16, 64])
@pytest.mark.parametrize("shift", [-0.8, 0.1, 0.7])
def test_p_values_are_those_of_student(count, shift):
    rng = random.Random(count)
    values = [rng.gauss(shift, 1) for _ in range(count)]
    above, below = mean_test(values)
    assert above == pytest.approx(stats.ttest_1samp(values, 0, alternative="greater").pvalue, rel=0.05, abs=1e-4)
    assert below == pytest.approx(stats.ttest_1samp(values, 0, alternative="less").pvalue, rel=0.05, abs=1e-4)


def test_values_without_a_spread_are_as_certain_as_their_number():
    assert mean_test([0.5, 0.5, 0.5]) == (0.125, 1.0)
    assert mean_test([-0.5] * 9 + [-0.5 - 1e-16]) == (1.0, 0.5**10)
    assert mean_test([-0.1 - 1e-17 * number for number in range(20)]) == (1.0, 0.5**20)
    assert mean_test([0.0, 0.0, 0.0]) == (1.0, 1.0)
