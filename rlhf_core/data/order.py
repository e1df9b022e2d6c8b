"""Order the data by epochs, each shuffled differently, as a pure function of the seed and the step.

The step alone determines the position in the data, so a resumed run needs no cursor.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from rlhf_core.types import derive_seed

T = TypeVar("T")


def rows_at(step: int, rows: Sequence[T], *, count: int, seed: int) -> list[T]:
    """Return `count` rows for `step`. An epoch may span several steps."""
    return rows_from(step * count, rows, count=count, seed=seed)


def rows_from(first: int, rows: Sequence[T], *, count: int, seed: int) -> list[T]:
    """Return `count` rows (at least one) from position `first` of the endless sequence of epochs."""
    size = len(rows)
    positions = range(first, first + count)
    epochs = range(positions[0] // size, positions[-1] // size + 1)
    orders = {epoch: shuffled(size, derive_seed(seed, "prompts", epoch)) for epoch in epochs}
    return [rows[orders[position // size][position % size]] for position in positions]


@lru_cache(maxsize=8)  # every step of an epoch asks for its order, and an order of a million rows takes half a second
def shuffled(count: int, seed: int) -> Sequence[int]:
    """Return the integers 0 ... count - 1 in a random order determined by `seed`."""
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order
