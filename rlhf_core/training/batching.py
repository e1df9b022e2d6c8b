"""Divide samples into micro-batches and ranks, and combine the metrics of ranks.

Micro-batches depend on the contents of the samples, but not on their order. The log-probs of a set of rollouts are
therefore computed in the same micro-batches before and during the update, bit for bit, and on one rank the first ratio
of the policy loss is exactly 1 (to rounding with `router_aux_coef`, whose updates share no rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rlhf_core.models.beginnings import common_beginnings
from rlhf_core.types import (
    AnswerSample,
    DistillationSample,
    PolicySample,
    PreferenceSample,
    RewardPair,
    StepSample,
    TokenSample,
    ValueSample,
)

Row: TypeAlias = (
    TokenSample
    | RewardPair
    | StepSample
    | PreferenceSample
    | AnswerSample
    | PolicySample
    | ValueSample
    | DistillationSample
)


ROWS = "router/rows"
"""Key of the number of token rows of the whole step in its denominators. A pair has two rows."""


def ordered(samples: Sequence[Row], *, together: int = 0) -> list[int]:
    """Return the indices of `samples` in the order of micro-batches: longest first, then by token IDs.

    With `together`, the width of a model that computes common first tokens once, samples that have them are neighbors,
    at the place of the longest of them. Those of other ranks are not seen.
    """
    keys = [(-row_length(sample), _sides(sample)) for sample in samples]
    if not together or any(len(sides) > 1 for _, sides in keys):
        return sorted(range(len(samples)), key=lambda index: keys[index])
    blocks = [
        sorted(block.samples, key=lambda index: keys[index])
        for block in common_beginnings([sides[0] for _, sides in keys], hidden=together)
    ]
    return [index for block in sorted(blocks, key=lambda block: keys[block[0]]) for index in block]


def micro_batches(
    samples: Sequence[Row], *, rows: int, pack_to: int | None, padded_tokens: int = 0, together: int = 0
) -> list[list[int]]:
    """Return the indices of each micro-batch in the order of `ordered`.

    A micro-batch has at most `rows` samples. With `padded_tokens`, it has as many samples as have at most that number
    of tokens when padded to the longest, and at least one. With packing, its samples have at most `rows * pack_to`
    tokens in total, which first-fit packs into about `rows` rows.
    """
    batches: list[list[int]] = []
    tokens = longest = 0
    for index in ordered(samples, together=together if pack_to is None else 0):
        length = row_length(samples[index])
        if pack_to is not None:
            full = tokens + length > rows * pack_to
        elif padded_tokens:
            full = (len(batches[-1]) + 1) * max(longest, length) > padded_tokens if batches else True
        else:
            full = len(batches[-1]) >= rows if batches else True
        if full or not batches:
            batches.append([])
            tokens = longest = 0
        batches[-1].append(index)
        tokens += length
        longest = max(longest, length)
    return batches


def shares(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Return the indices of each rank's samples, dealt by length in alternating direction so that the work is balanced.

    The numbers of samples of two ranks differ by at most one. A single rank keeps the order.

    >>> shares([5, 1, 4, 2, 3, 6], 2)
    [[3, 4, 5], [0, 1, 2]]
    """
    dealt: list[list[int]] = [[] for _ in range(world)]
    for position, index in enumerate(sorted(range(len(lengths)), key=lambda index: -lengths[index])):
        lap, seat = divmod(position, world)
        dealt[seat if lap % 2 == 0 else world - 1 - seat].append(index)
    return [sorted(indices) for indices in dealt]


def is_maximum(name: str) -> bool:
    """Return whether a metric is the maximum over its parts (micro-batches, ranks, optimizer steps).

    The name alone decides. Every other metric is a share of its step: shares are summed, and steps are averaged.

    >>> is_maximum("policy/ratio_max"), is_maximum("policy/loss")
    (True, False)
    """
    return name.endswith("_max")


def reduce(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from those of its ranks: sums, or maxima (`is_maximum`).

    Use it for the metrics of `forward_backward` and `loss`; those of `optim_step` are the same on every rank.

    >>> reduce([{"loss": 0.25, "ratio_max": 1.5}, {"loss": 0.5, "ratio_max": 1.25}])
    {'loss': 0.75, 'ratio_max': 1.5}
    """
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name not in total:
                total[name] = value
            else:
                total[name] = max(total[name], value) if is_maximum(name) else total[name] + value
    return total


def averaged(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the combined metrics of several optimizer steps: means, or maxima (`is_maximum`).

    >>> averaged([{"loss": 0.25, "ratio_max": 1.5}, {"loss": 0.75, "ratio_max": 1.25}])
    {'loss': 0.5, 'ratio_max': 1.5}
    """
    return {name: value if is_maximum(name) else value / len(steps) for name, value in reduce(steps).items()}


def row_length(sample: Row | tuple[int, ...]) -> int:
    """Return the number of tokens in a sample's row, or in the longer row of a pair."""
    return len(sample) if isinstance(sample, tuple) else max(len(ids) for ids in _sides(sample))


def row_count(sample: Row) -> int:
    """Return the number of token rows of a sample in a forward pass, two for a pair."""
    return len(_sides(sample))


def step_counts(objective: Any, samples: Sequence[Any]) -> dict[str, float]:
    """Return the denominators of `objective` over a whole step, and the number of token rows for a router's balance.

    The objective's own number of token rows takes precedence, if any, because `samples` are then a part of the step.
    """
    rows = float(sum(row_count(sample) for sample in samples))
    counts: dict[str, float] = {ROWS: rows, **objective.denominators(samples)}
    return counts


def _sides(sample: Row) -> tuple[tuple[int, ...], ...]:
    match sample:
        case RewardPair():
            return (sample.chosen_ids, sample.rejected_ids)
        case PreferenceSample():
            return (sample.chosen.token_ids, sample.rejected.token_ids)
        case AnswerSample():
            return (sample.answer.token_ids,)
        case _:
            return (sample.token_ids,)
