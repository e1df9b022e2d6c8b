"""Packing: whole samples, full rows."""

from __future__ import annotations

import random

import pytest

from rlhf_core.data.packing import pack
from rlhf_core.types import TokenSample


def samples(*lengths: int) -> list[TokenSample]:
    return [TokenSample((1,) * length, (0,) * length) for length in lengths]


def test_rows_that_fit_exactly_are_filled() -> None:
    assert pack(samples(6, 4, 5, 5, 10), 10) == [(0, 1), (2, 3), (4,)]


def test_each_sample_takes_the_tightest_row() -> None:
    # decreasing: 7 -> row a (3 left), 6 -> row b (4 left), 3 -> the tightest that fits: a
    assert pack(samples(6, 7, 3), 10) == [(0,), (1, 2)]


def test_every_sample_is_in_one_row_and_no_row_is_too_long() -> None:
    rng = random.Random(3)
    lengths = [rng.randint(1, 40) for _ in range(300)]
    bins = pack(samples(*lengths), 64)
    assert sorted(index for members in bins for index in members) == list(range(300))
    assert max(sum(lengths[index] for index in members) for members in bins) <= 64
    assert len(bins) <= -(-sum(lengths) // 64) + 2  # within two rows of the least possible


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 1 has 11 tokens, a row 10"):
        pack(samples(3, 11), 10)
