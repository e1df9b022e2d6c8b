"""Which samples go through the model together, which rank they belong to, and how the ranks' metrics come together.

Micro-batches depend on the contents of the samples and not on the order in which they come. The log-probs of a set of
rollouts are therefore computed in the same micro-batches before the update and in it, bit for bit, and on one rank the
first ratio of the policy loss is exactly 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from rlhf_core.types import PolicySample, PreferenceSample, RewardPair, TokenSample, ValueSample

Row: TypeAlias = TokenSample | RewardPair | PreferenceSample | PolicySample | ValueSample
T = TypeVar("T")


def ordered(samples: Sequence[Row]) -> list[int]:
    """Return the indices of `samples`, longest first and then by token ids: the order of micro-batches."""
    keys = [_sides(sample) for sample in samples]
    return sorted(range(len(samples)), key=lambda index: (-_length(samples[index]), keys[index]))


def micro_batches(samples: Sequence[Row], *, rows: int, pack_to: int | None) -> list[list[int]]:
    """Return the indices of each micro-batch in the order of `ordered`.

    A micro-batch has at most `rows` samples; with packing, samples of at most `rows * pack_to` tokens together, which
    first-fit lays out in about `rows` rows.
    """
    batches: list[list[int]] = []
    tokens = 0
    for index in ordered(samples):
        length = _length(samples[index])
        full = not batches or (len(batches[-1]) >= rows if pack_to is None else tokens + length > rows * pack_to)
        if full:
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += length
    return batches


def shard(samples: Sequence[T], rank: int, world: int) -> Sequence[T]:
    """Return the samples of `rank` out of `world`: every world-th, so that ranks differ by at most one sample.

    >>> [list(shard(range(5), rank, 2)) for rank in (0, 1)]
    [[0, 2, 4], [1, 3]]
    """
    return samples[rank::world]


def reduce(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from those of its ranks: sums, or the maximum where the name ends in `_max`.

    For what `forward_backward` and `loss` return; what `optim_step` returns is the same on every rank.

    >>> reduce([{"loss": 0.25, "ratio_max": 1.5}, {"loss": 0.5, "ratio_max": 1.25}])
    {'loss': 0.75, 'ratio_max': 1.5}
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if name.endswith("_max") else total[name] + value
    return total


def _length(sample: Row) -> int:
    return max(len(ids) for ids in _sides(sample))


def _sides(sample: Row) -> tuple[tuple[int, ...], ...]:
    match sample:
        case RewardPair():
            return (sample.chosen_ids, sample.rejected_ids)
        case PreferenceSample():
            return (sample.chosen.token_ids, sample.rejected.token_ids)
        case _:
            return (sample.token_ids,)
