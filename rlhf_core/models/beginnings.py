"""Find samples that begin with the same tokens, as the answers to a prompt do, so that these are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LONGEST = 4096
"""Maximum length of a block, and of shared rows: their attention needs an L x L mask."""
MOST = 64
"""Maximum number of different sequences in a block, which bounds the search."""
LEAST_SAVED = 0.1
"""Minimum fraction of its cost that a block must save: a mask is slower than plain causal attention."""


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences (by index) that all begin with the same `prefix` tokens; `length` counts these, and equal ones, once."""

    samples: tuple[int, ...]
    prefix: int
    length: int


def cost(length: int, hidden: int) -> int:
    """Return the cost of a row of `length` tokens in a layer of width `hidden`, in units of 4 * hidden operations.

    A position costs 24 * hidden^2 operations in the projections and the MLP, a pair of positions 4 * hidden.
    """
    return length * (6 * hidden + length)


def common_beginnings(sequences: Sequence[tuple[int, ...]], *, hidden: int) -> list[Block]:
    """Divide `sequences`, in the order of their tokens, where it saves a model of width `hidden` the most.

    A sequence that would save too little is a block of its own. Equal sequences are always in one block. The blocks
    depend on the sequences alone and not on their order, apart from the indices.

    >>> common_beginnings([(5, 7, 2), (4, 4), (5, 7, 7, 2), (4, 4)], hidden=64)
    [Block(samples=(1, 3), prefix=0, length=2), Block(samples=(0, 2), prefix=2, length=5)]
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for index, sequence in enumerate(sequences):
        places.setdefault(sequence, []).append(index)
    # Sequences that begin alike are neighbors in the order of their tokens, so a block is a stretch of that order.
    ordered = sorted(places)
    lengths = [len(sequence) for sequence in ordered]
    common = _shared_tokens(ordered)
    best = [(0.0, 0)]  # for each number of sequences: the most that they save, and where their last block begins
    for end in range(1, len(ordered) + 1):
        found = (best[end - 1][0], end - 1)
        prefix = total = lengths[end - 1]
        apart = cost(total, hidden)
        for start in range(end - 2, max(-1, end - 1 - MOST), -1):
            prefix = min(prefix, common[start])
            total += lengths[start]
            apart += cost(lengths[start], hidden)
            length = total - prefix * (end - start - 1)
            if prefix == 0 or length > LONGEST:
                break  # a longer stretch shares no more tokens, and its block is no shorter
            saved = apart - cost(length, hidden)
            if saved >= LEAST_SAVED * apart:
                found = max(found, (best[start][0] + saved, start))
        best.append(found)
    blocks: list[Block] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        prefix = min(common[start : end - 1], default=0)
        samples = [index for sequence in ordered[start:end] for index in places[sequence]]
        blocks.append(Block(tuple(samples), prefix, sum(lengths[start:end]) - prefix * (end - start - 1)))
        end = start
    return blocks[::-1]


def _shared_tokens(ordered: Sequence[tuple[int, ...]]) -> list[int]:
    """Return how many tokens each sequence and the next one begin with."""
    arrays = [np.asarray(sequence, dtype=np.int64) for sequence in ordered]
    shared = []
    for one, other in pairwise(arrays):
        size = min(len(one), len(other))
        different = np.flatnonzero(one[:size] != other[:size])
        shared.append(int(different[0]) if len(different) else size)
    return shared
