from __future__ import annotations

import random

import pytest

from rlhf_core.data.order import rows_at, shuffled

ROWS = ["a", "b", "c", "d", "e"]


def test_rows_come_epoch_by_epoch_each_once() -> None:
    taken = [row for step in range(5) for row in rows_at(step, ROWS, count=2, seed=3)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == ROWS
    assert taken[:5] != taken[5:]


def test_the_order_of_an_epoch_is_drawn_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    class Counted(random.Random):
        def __init__(self, seed: int) -> None:
            super().__init__(seed)
            drawn.append(seed)

    monkeypatch.setattr(random, "Random", Counted)
    rows_at(1, ROWS, count=4, seed=3)  # rows 4 to 7: the end of one epoch and the start of the next
    assert len(drawn) == len(set(drawn)) == 2


def test_an_order_holds_every_position_once_and_depends_on_the_seed() -> None:
    assert sorted(shuffled(50, 1)) == list(range(50))
    assert shuffled(50, 1) == shuffled(50, 1) != shuffled(50, 2)
