"""Combine several rewards of one generation to a single number.

A term that does not apply to a generation has None there. It adds nothing to a sum, and as a gate it is open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf_core.config.rewards import Composition, GatedProduct, Gdpo, WeightedSum
from rlhf_core.errors import RewardError, explain

Components = Mapping[str, Sequence[float | None]]
"""Reward name -> one value per generation, None where it does not apply."""


def compose(
    components: Components, composition: Composition, weights: Mapping[str, float], groups: Sequence[str]
) -> list[float | None]:
    """Return one reward per generation, combined as the configuration says; None where no term of `weights` applies.

    `groups` names the prompt of each generation: what has the same name is one group.
    """
    match composition:
        case WeightedSum():
            return weighted_sum(components, weights)
        case GatedProduct(gates=gates, closed=closed):
            return gated_product(components, weights, gates=gates, closed=closed)
        case Gdpo():
            return weighted_sum({name: in_group(values, groups) for name, values in components.items()}, weights)


def weighted_sum(components: Components, weights: Mapping[str, float]) -> list[float | None]:
    """Return sum over the terms of `weights` that apply of weight * value, per generation; None where none does.

    >>> weighted_sum({"a": [1.0, None], "b": [0.5, None]}, {"a": 1.0, "b": 2.0})
    [2.0, None]
    """
    rows = zip(*(components[name] for name in weights), strict=True)
    return [_weighed(list(weights.values()), row) for row in rows]


def gated_product(
    components: Components, weights: Mapping[str, float], *, gates: Sequence[str], closed: float
) -> list[float | None]:
    """Return g * (weighted sum of the other terms) + (1 - g) * closed, g the product of the gates.

    A bare product would pay for failing the gate wherever the sum is negative; hence `closed`. Behind a gate that is
    shut the other terms need not apply. RewardError when a gate is outside [0, 1].

    >>> gated_product({"form": [1.0, 0.0], "x": [-2.0, 5.0]}, {"x": 1.0}, gates=["form"], closed=-3.0)
    [-2.0, -3.0]
    """
    for name in gates:
        for value in components[name]:
            if value is not None and not 0 <= value <= 1:
                raise RewardError(explain(f"rewards.{name}", value, "a gate must be in [0, 1]", "remove it from gates"))
    sums = weighted_sum(components, {name: weight for name, weight in weights.items() if name not in gates})
    opened = [
        math.prod(value for value in row if value is not None)
        for row in zip(*(components[name] for name in gates), strict=True)
    ]
    return [_gated(gate, total, closed) for gate, total in zip(opened, sums, strict=True)]


def in_group(values: Sequence[float | None], groups: Sequence[str]) -> list[float | None]:
    """Return (value - mean) / std of the values of the same group, 0 where they do not differ: GDPO, arXiv 2601.05242.

    The standard deviation is the sample's (divisor G - 1), as in `rlhf_core.algorithms.advantage.grpo`.

    >>> in_group([1.0, 3.0, 5.0, None], ["p", "p", "q", "p"])
    [-0.7071067811865475, 0.7071067811865475, 0.0, None]
    """
    members: dict[str, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        if value is not None:
            members.setdefault(group, []).append(value)
    scale = {group: _mean_and_std(found) for group, found in members.items()}
    return [
        None if value is None else _standardized(value, *scale[group])
        for value, group in zip(values, groups, strict=True)
    ]


def _weighed(weights: Sequence[float], row: Sequence[float | None]) -> float | None:
    parts = [weight * value for weight, value in zip(weights, row, strict=True) if value is not None]
    return math.fsum(parts) if parts else None


def _gated(gate: float, total: float | None, closed: float) -> float | None:
    if total is None:
        return closed if gate == 0 else None
    return gate * total + (1 - gate) * closed


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    if min(values) == max(values):  # exactly 0, and not rounding noise divided by noise
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _standardized(value: float, mean: float, std: float) -> float:
    return (value - mean) / std if std else 0.0
