"""Rewards of token ids, in a module that imports nothing slow: every run starts a process for each."""

from collections.abc import Sequence

from rlhf_core.types import Generation


def small_is_good(generations: Sequence[Generation]) -> list[float]:
    """Return a reward that a random policy can learn: tokens with small ids."""
    return [-sum(row.completion.token_ids) / len(row.completion.token_ids) / 100 for row in generations]


def large_is_good(generations: Sequence[Generation]) -> list[float]:
    """Return the opposite."""
    return [-value for value in small_is_good(generations)]


def every_fourth(generations: Sequence[Generation]) -> list[float]:
    """Return a reward that leaves most pairs undecided."""
    return [float(row.completion.token_ids[0] % 4 == 0) for row in generations]
