"""Packing: which samples share a row. The collate gives each its own segment and positions, so nothing leaks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from rlhf_core.types import TokenSample


def pack(samples: Sequence[TokenSample], max_length: int) -> list[tuple[int, ...]]:
    """Return bins of sample indices whose lengths add to at most `max_length` (best-fit decreasing).

    Every sample is in exactly one bin, whole; the result depends on the lengths and their order only. Bins are in the
    order of their first sample, so that shuffled samples stay shuffled. ValueError if a sample is longer than
    `max_length`.

    >>> pack([TokenSample((1,) * n, (0,) * n) for n in (3, 5, 2)], 5)
    [(0, 2), (1,)]
    """
    lengths = [len(sample.token_ids) for sample in samples]
    too_long = [index for index, length in enumerate(lengths) if length > max_length]
    if too_long:
        raise ValueError(f"sample {too_long[0]} has {lengths[too_long[0]]} tokens, a row {max_length}; truncate it")
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(samples)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(free, (lengths[index], -1))
        if place == len(free):
            bins.append([index])
            insort(free, (max_length - lengths[index], len(bins) - 1))
        else:
            room, number = free.pop(place)
            bins[number].append(index)
            insort(free, (room - lengths[index], number))
    return sorted(tuple(sorted(members)) for members in bins)
