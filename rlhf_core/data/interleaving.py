"""The order in which rows of several sources are drawn by their shares, as in `datasets.interleave_datasets`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

import numpy as np

StoppingStrategy: TypeAlias = Literal["first_exhausted", "all_exhausted"]
_BLOCK = 1000
"""Number of sources drawn at a time, for speed. The sequence does not depend on it."""


def interleave(
    lengths: Mapping[str, int], shares: Mapping[str, float], *, stopping_strategy: StoppingStrategy, seed: int
) -> Iterator[tuple[str, int]]:
    """Yield the source of each row and the row's position in it, until one source, or every source, is exhausted.

    Each draw is independent and has the probabilities `shares`, which need not add up to 1. Where rows are repeated, a
    source begins again at its first row. Every source needs a row and a share.

    >>> list(interleave({"a": 1, "b": 2}, {"a": 1, "b": 3}, stopping_strategy="first_exhausted", seed=0))
    [('b', 0), ('b', 1)]
    >>> list(interleave({"a": 1, "b": 2}, {"a": 1, "b": 3}, stopping_strategy="all_exhausted", seed=0))
    [('b', 0), ('b', 1), ('a', 0)]
    """
    names = list(shares)
    weights = np.array([shares[name] for name in names], dtype=np.float64)
    draws, counts, remaining = np.random.default_rng(seed), Counter[str](), len(names)
    while True:
        for place in draws.choice(len(names), size=_BLOCK, p=weights / weights.sum()).tolist():
            name = names[place]
            yield name, counts[name] % lengths[name]
            counts[name] += 1
            if counts[name] == lengths[name]:
                remaining -= 1
                if stopping_strategy == "first_exhausted" or not remaining:
                    return
