"""Several rewards of one generation to a single number; the parts are kept beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlhf_core.config.rewards import GatedProduct, RewardsConfig, WeightedSum
from rlhf_core.errors import RewardError, explain

Components = Mapping[str, Sequence[float]]
"""Reward name -> one value per generation."""


def compose(components: Components, config: RewardsConfig) -> list[float]:
    """Return one reward per generation, combined as the configuration says."""
    weights = {name: spec.weight for name, spec in config.terms.items()}
    match config.composition:
        case WeightedSum():
            return weighted_sum(components, weights)
        case GatedProduct(gates=gates, closed=closed):
            return gated_product(components, weights, gates=gates, closed=closed)


def weighted_sum(components: Components, weights: Mapping[str, float]) -> list[float]:
    """Return sum over the terms of weight * value, per generation.

    >>> weighted_sum({"a": [1.0, 2.0], "b": [0.5, 0.0]}, {"a": 1.0, "b": 2.0})
    [2.0, 2.0]
    """
    rows = zip(*(components[name] for name in weights), strict=True)
    return [math.fsum(weight * value for weight, value in zip(weights.values(), row, strict=True)) for row in rows]


def gated_product(
    components: Components, weights: Mapping[str, float], *, gates: Sequence[str], closed: float
) -> list[float]:
    """Return g * (weighted sum of the other terms) + (1 - g) * closed, g the product of the gates.

    A bare product would pay for failing the gate wherever the sum is negative; hence `closed`. RewardError when a gate
    is outside [0, 1].

    >>> gated_product({"form": [1.0, 0.0], "x": [-2.0, 5.0]}, {"x": 1.0}, gates=["form"], closed=-3.0)
    [-2.0, -3.0]
    """
    for name in gates:
        for value in components[name]:
            if not 0 <= value <= 1:
                raise RewardError(explain(f"rewards.{name}", value, "a gate must be in [0, 1]", "take it out of gates"))
    sums = weighted_sum(components, {name: weight for name, weight in weights.items() if name not in gates})
    opened = [math.prod(row) for row in zip(*(components[name] for name in gates), strict=True)]
    return [gate * total + (1 - gate) * closed for gate, total in zip(opened, sums, strict=True)]
