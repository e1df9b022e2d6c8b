from __future__ import annotations

import math

import pytest

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.training.adamw import Schedule, learning_rate, scheduled_rate


def rates(total: int, schedule: Schedule, warmup: float = 0.0, minimum: float = 0.0) -> list[float]:
    return [
        learning_rate(
            step, total_steps=total, peak=2.0, schedule=schedule, warmup_fraction=warmup, min_fraction=minimum
        )
        for step in range(total)
    ]


def test_the_linear_schedule_falls_by_equal_amounts_and_leaves_something_for_the_last_step() -> None:
    assert rates(4, "linear") == [2.0, 1.5, 1.0, 0.5]


def test_the_cosine_schedule_is_at_half_the_peak_halfway() -> None:
    # (1 + cos(pi / 4)) / 2 * 2 = 1.7071; halfway 1; (1 + cos(3 pi / 4)) / 2 * 2 = 0.2929
    root = math.sqrt(0.5)
    assert rates(4, "cosine") == pytest.approx([2.0, 1 + root, 1.0, 1 - root])


def test_the_rate_falls_towards_the_minimum_fraction_of_the_peak() -> None:
    # min 0.2 of 2.0 is 0.4; halfway 0.4 + 1.6 * 0.5
    assert rates(2, "linear", minimum=0.2) == pytest.approx([2.0, 1.2])
    assert rates(2, "cosine", minimum=0.2) == pytest.approx([2.0, 1.2])


def test_the_warm_up_counts_true_steps_starts_above_zero_and_ends_at_the_peak() -> None:
    # 0.4 of 10 steps: 2 * (1, 2, 3, 4) / 4, then constant
    assert rates(10, "constant", warmup=0.4) == [0.5, 1.0, 1.5, 2.0] + [2.0] * 6


def test_a_warm_up_of_a_fraction_of_a_step_takes_one_step_and_a_whole_number_is_not_rounded_up() -> None:
    assert rates(10, "linear", warmup=0.01)[:2] == [2.0, 2.0]
    # 0.07 * 100 = 7.000000000000001 must give 7 steps: the seventh is the peak
    assert rates(100, "constant", warmup=0.07)[5:8] == pytest.approx([2 * 6 / 7, 2.0, 2.0])


def test_a_single_step_trains_at_the_peak() -> None:
    assert rates(1, "cosine", warmup=0.05) == [2.0]


def test_a_step_that_is_not_one_of_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"step = 4: must be in \[0, total_steps = 4\)"):
        learning_rate(4, total_steps=4, peak=1.0, schedule="linear", warmup_fraction=0.0, min_fraction=0.0)


def test_an_optimizer_configuration_gives_its_own_numbers() -> None:
    config = OptimizerConfig(learning_rate=2.0, schedule="linear", warmup_fraction=0.25, min_lr_fraction=0.5)
    # one step of warm-up; then from 2 towards 1 over three steps
    assert [scheduled_rate(config, step, 4) for step in range(4)] == pytest.approx([2.0, 2.0, 5 / 3, 4 / 3])
