"""Divide samples into micro-batches, in which samples that begin with the same tokens stay together.

Micro-batches depend on the contents of the samples, but not on their order. The log-probs of a set of rollouts are
therefore computed in the same micro-batches before and during the update, bit for bit, and on one rank the first ratio
of the policy loss is exactly 1 (to rounding with `router_aux_coef`, whose updates share no rows).

Samples begin with the same tokens as the answers to a prompt do, or the two sides of a pair; a model may compute these
tokens once (`rlhf_core.models.batches`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from rlhf_core.sequences import Samples, Sequences, Subset
from rlhf_core.types import (
    AnswerSample,
    Column,
    PreferenceSample,
    RewardPair,
)

LONGEST = 4096
"""Maximum length of a block, and of shared rows: their attention needs an L x L mask."""
MOST = 64
"""Maximum number of different sequences in a block, which bounds the search."""
LEAST_SAVED = 0.1
"""Minimum fraction of its cost that a block must save: a mask is slower than plain causal attention."""


def ordered(samples: Samples, *, together: int = 0) -> list[int]:
    """Order the indices of `samples` for micro-batches: longest first, then by token IDs.

    With `together`, the width of a model that computes common first tokens once, samples that have them are neighbors,
    at the place of the longest of them. Samples of other ranks are not seen.
    """
    rows = token_rows(samples)
    keys = [(-max(map(len, sides)), [_order(side) for side in sides]) for sides in rows]
    if not together or any(len(sides) > 1 for sides in rows):
        return sorted(range(len(samples)), key=lambda index: keys[index])
    blocks = [
        sorted(block.samples, key=lambda index: keys[index])
        for block in common_beginnings([side for (side,) in rows], hidden=together)
    ]
    return [index for block in sorted(blocks, key=lambda block: keys[block[0]]) for index in block]


def micro_batches(
    samples: Samples, *, rows: int, pack_to: int | None, padded_tokens: int = 0, together: int = 0
) -> list[list[int]]:
    """Divide the indices of `samples` into micro-batches, in the order of `ordered`.

    A micro-batch has at most `rows` samples. With `padded_tokens`, it has as many samples as have at most that number
    of tokens when padded to the longest, and at least one. With packing, its samples have at most `rows * pack_to`
    tokens in total, which first-fit packs into about `rows` rows.
    """
    batches: list[list[int]] = []
    tokens = longest = 0
    lengths = row_lengths(samples)
    for index in ordered(samples, together=together if pack_to is None else 0):
        length, count = lengths[index], len(batches[-1]) if batches else 0
        if pack_to is not None:
            full = tokens + length > rows * pack_to
        elif padded_tokens:
            full = (count + 1) * max(longest, length) > padded_tokens
        else:
            full = count >= rows
        if full or not batches:
            batches.append([])
            tokens = longest = 0
        batches[-1].append(index)
        tokens += length
        longest = max(longest, length)
    return batches


def row_lengths(samples: Samples) -> list[int]:
    """The number of tokens in each sample's row, or in the longer row of a pair."""
    if isinstance(samples, (Sequences, Subset)):
        return samples.lengths.tolist()  # type: ignore[no-any-return]
    return [max(map(len, sides)) for sides in token_rows(samples)]


def row_count(samples: Samples) -> int:
    """The number of token rows of samples in a forward pass, two for each pair."""
    return len(samples) if isinstance(samples, (Sequences, Subset)) else sum(map(len, token_rows(samples)))


def token_rows(samples: Any) -> list[tuple[Any, ...]]:
    """The token ids of each sample, two rows for a pair."""
    if isinstance(samples, Sequences):
        return [(row,) for row in samples.split(samples.token_ids)]
    return [_sides(sample) for sample in samples]


def _sides(sample: Any) -> tuple[Column[int], ...]:
    match sample:
        case Column():
            return (sample,)
        case RewardPair():
            return (sample.chosen_ids, sample.rejected_ids)
        case PreferenceSample():
            return (sample.chosen.token_ids, sample.rejected.token_ids)
        case AnswerSample():
            return (sample.answer.token_ids,)
        case _:
            return (sample.token_ids,)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Sequences (by index) that all begin with the same `prefix` tokens; `length` counts these, and equal ones, once."""

    samples: tuple[int, ...]
    prefix: int
    length: int


def cost(length: int, hidden: int) -> int:
    """Cost of a row of `length` tokens in a layer of width `hidden`, in units of 4 * hidden operations.

    A position costs 24 * hidden^2 operations in the projections and the MLP, a pair of positions 4 * hidden.
    """
    return length * (6 * hidden + length)


def common_beginnings(sequences: Sequence[Any], *, hidden: int) -> list[RowBlock]:
    """Divide `sequences`, in the order of their tokens, where it saves a model of width `hidden` the most.

    A sequence that would save too little forms a separate block. Equal sequences are always in one block. The blocks
    depend on the sequences alone and not on their order, apart from the indices.

    >>> common_beginnings([(5, 7, 2), (4, 4), (5, 7, 7, 2), (4, 4)], hidden=64)
    [RowBlock(samples=(1, 3), prefix=0, length=2), RowBlock(samples=(0, 2), prefix=2, length=5)]
    """
    places: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        places.setdefault(_order(sequence), []).append(index)
    # Sequences that begin alike are neighbors in the order of their tokens, so a block is a stretch of that order.
    ordered = sorted(places)
    lengths = [len(sequence) // 4 for sequence in ordered]
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
    blocks: list[RowBlock] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        prefix = min(common[start : end - 1], default=0)
        samples = [index for sequence in ordered[start:end] for index in places[sequence]]
        blocks.append(RowBlock(tuple(samples), prefix, sum(lengths[start:end]) - prefix * (end - start - 1)))
        end = start
    return blocks[::-1]


def _order(token_ids: Any) -> bytes:
    """Bytes that sort like the tokens, none of which is negative: 4 for each, the highest first."""
    return np.asarray(getattr(token_ids, "data", token_ids), dtype=">i4").tobytes()


def _shared_tokens(ordered: Sequence[bytes]) -> list[int]:
    """Count the tokens that each sequence and the next one, in `_order`, begin with."""
    arrays = [np.frombuffer(sequence, dtype=">i4") for sequence in ordered]
    shared = []
    for one, other in pairwise(arrays):
        size = min(len(one), len(other))
        different = np.flatnonzero(one[:size] != other[:size])
        shared.append(int(different[0]) if len(different) else size)
    return shared
