"""Normalisation, clip and the overlong penalty."""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import fmean, pstdev

import pytest

from rlhf_core.rewards.shaping import RunningNormalizer, clipped, linear_weight, soft_overlong


def test_the_running_statistics_are_those_of_everything_seen() -> None:
    batches = [[1.0, 2.0, 4.0], [10.0], [], [-3.0, 0.5]]
    normaliser = RunningNormalizer.empty()
    for batch in batches:
        normaliser = normaliser.updated(batch)
    everything = [value for batch in batches for value in batch]
    assert normaliser.mean == pytest.approx(fmean(everything), rel=1e-12)
    assert normaliser.normalized([2.0])[0] == pytest.approx((2.0 - fmean(everything)) / pstdev(everything), rel=1e-6)


def test_equal_rewards_normalise_to_zero_and_not_to_noise() -> None:
    assert RunningNormalizer.empty().updated([0.7, 0.7]).normalized([0.7, 5.0]) == [0.0, 0.0]


def test_a_large_offset_does_not_cost_precision() -> None:
    normaliser = RunningNormalizer.empty().updated([1e9, 1e9 + 1]).updated([1e9 + 2])
    assert normaliser.squares == pytest.approx(2.0, rel=1e-6)


def test_the_normaliser_survives_a_checkpoint() -> None:
    normaliser = RunningNormalizer.empty().updated([0.1, 0.7])
    assert RunningNormalizer(**json.loads(json.dumps(asdict(normaliser)))) == normaliser


def test_the_clip_is_symmetric() -> None:
    assert clipped([-3.0, 1.0, 3.0], limit=2.0) == [-2.0, 1.0, 2.0]


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (80, 0.0), (85, -0.5), (90, -1.0), (100, -2.0), (120, -2.0)])
def test_the_overlong_penalty_falls_linearly_over_the_buffer(length: int, penalty: float) -> None:
    assert soft_overlong(length, max_tokens=100, buffer_tokens=20, factor=2.0) == penalty


def test_a_weight_moves_in_a_straight_line_and_then_stays() -> None:
    weights = [linear_weight(step, start=1.0, end=3.0, steps=4) for step in (0, 1, 4, 9)]
    assert weights == [1.0, 1.5, 3.0, 3.0]
