"""Divide samples among ranks, and combine the metrics of micro-batches, ranks and steps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhf_core.models.micro_batches import row_count
from rlhf_core.sequences import Samples

ROWS = "router/rows"
"""Key of the number of token rows of the whole step in its denominators. A pair has two rows."""


def shares(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Deal the indices of samples to ranks, by length in alternating direction so that the work is balanced.

    The numbers of samples of two ranks differ by at most one. A single rank keeps the order.

    >>> shares([5, 1, 4, 2, 3, 6], 2)
    [[3, 4, 5], [0, 1, 2]]
    """
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    lap, seat = np.divmod(np.arange(len(order)), world)
    ranks = np.where(lap % 2 == 0, seat, world - 1 - seat)
    return [np.sort(order[ranks == rank]).tolist() for rank in range(world)]


def is_maximum(name: str) -> bool:
    """Whether a metric is the maximum over its parts (micro-batches, ranks, optimizer steps).

    The name alone decides. Every other metric is a share of its step: shares are summed, and steps are averaged.

    >>> is_maximum("policy/ratio_max"), is_maximum("policy/loss")
    (True, False)
    """
    return name.endswith("_max")


def reduce(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step over its ranks: sums, or maxima (`is_maximum`).

    Use it for the metrics of `forward_backward` and `loss`; metrics of `optim_step` are the same on every rank.

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
    """Combine the metrics of several optimizer steps: means, or maxima (`is_maximum`).

    >>> averaged([{"loss": 0.25, "ratio_max": 1.5}, {"loss": 0.75, "ratio_max": 1.25}])
    {'loss': 0.5, 'ratio_max': 1.5}
    """
    return {name: value if is_maximum(name) else value / len(steps) for name, value in reduce(steps).items()}


def step_counts(objective: Any, samples: Samples) -> dict[str, float]:
    """Count the denominators of `objective` over a whole step, and the token rows for a router's balance.

    The objective's own number of token rows takes precedence, if any, because `samples` are then a part of the step.
    """
    counts: dict[str, float] = {ROWS: float(row_count(samples)), **objective.denominators(samples)}
    return counts
