from __future__ import annotations

import random

import pytest

from rlhf_core.data.mixing import rows_at, shuffled_indices
from rlhf_core.training.fit import batch_at

ROWS = ["a", "b", "c", "d", "e"]


def test_rows_come_epoch_by_epoch_each_once() -> None:
    taken = [row for step in range(5) for row in rows_at(step, ROWS, count=2, seed=3)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == ROWS
    assert taken[:5] != taken[5:]


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    class Counted(random.Random):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            drawn.append(seed)

    monkeypatch.setattr(random, "Random", Counted)
    shuffled_indices.cache_clear()
    for step in range(4):  # rows 0 to 15, of four epochs
        rows_at(step, ROWS, count=4, seed=3)
        batch_at(step, ROWS, batch_size=2, seed=3)
    assert len(drawn) == len(set(drawn)) == 4 + 2


def test_an_order_holds_every_position_once_and_depends_on_the_seed() -> None:
    assert sorted(shuffled_indices(50, 1)) == list(range(50))
    assert shuffled_indices(50, 1) != shuffled_indices(50, 2)
    expected = list(range(50))
    random.Random(1).shuffle(expected)
    assert list(shuffled_indices(50, 1)) == expected
