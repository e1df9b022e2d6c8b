"""Find samples that begin with the same tokens, as the answers to a prompt do, so that these are computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LONGEST_BLOCK = 512
"""Maximum length of a block of several samples: attention computes all pairs of its positions."""
LEAST_SHARED = 0.1
"""Minimum fraction of its tokens that a block must save."""


@dataclass(frozen=True, slots=True)
class Block:
    """Samples (by index) that all begin with the same `prefix` tokens; `length` counts these once."""

    samples: tuple[int, ...]
    prefix: int
    length: int


def common_beginnings(sequences: Sequence[tuple[int, ...]], *, limit: int = LONGEST_BLOCK) -> list[Block]:
    """Divide `sequences` into blocks of at most `limit` tokens that together save the most tokens.

    A sequence that shares too little is a block of its own, whatever its length. Which sequences share a block depends
    on their tokens alone, so equal ones may change places.

    >>> common_beginnings([(5, 7, 2), (4, 4), (5, 7, 7, 2)])
    [Block(samples=(1,), prefix=0, length=2), Block(samples=(0, 2), prefix=2, length=5)]
    """
    # Sequences that begin alike are neighbors in the order of their tokens, so a block is a stretch of that order.
    ordered = sorted(range(len(sequences)), key=lambda index: (sequences[index], index))
    lengths = [len(sequences[index]) for index in ordered]
    common = [_shared(sequences[one], sequences[other]) for one, other in pairwise(ordered)]
    best = [(0, 0)]  # for each number of sequences: the most tokens that they save, and where their last block begins
    for end in range(1, len(ordered) + 1):
        found = (best[end - 1][0], end - 1)
        prefix = total = lengths[end - 1]
        for start in range(end - 2, -1, -1):
            prefix = min(prefix, common[start])
            total += lengths[start]
            saved = prefix * (end - start - 1)
            if prefix == 0 or total - saved > limit:
                break  # a longer stretch shares no more tokens, and its block is no shorter
            if saved >= LEAST_SHARED * total:
                found = max(found, (best[start][0] + saved, start))
        best.append(found)
    blocks: list[Block] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        prefix = min(common[start : end - 1], default=0)
        length = sum(lengths[start:end]) - prefix * (end - start - 1)
        blocks.append(Block(tuple(ordered[start:end]), prefix, length))
        end = start
    return blocks[::-1]


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    different = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(different, min(len(one), len(other)))
