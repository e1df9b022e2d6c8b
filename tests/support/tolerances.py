"""How far apart two float32 results may be that are equal but for the order in which they were added up.

Derived once, for all tests. One float32 operation changes its result by a share of at most u = 2^-24. Of n roundings on
the way to a result each may add such an error; they come with both signs, so that together they are at most
lambda sqrt(n) u of the magnitudes that were added up, with a probability of at least 1 - 2 exp(-lambda^2 / 2) (Higham and
Mary, A new approach to probabilistic rounding error analysis, 2019, theorem 2.4). lambda = 6 is all but 4 results in 10^8.
Two results with roundings of their own differ by at most twice as much:

    roundings(n) = 2 * 6 * sqrt(n) * 2^-24 = 7.2e-7 sqrt(n)

This holds for any order of the additions: another batch, number of threads, instruction set or machine. It is a share of
the sum of the magnitudes, which is larger than the result where terms cancel; the tests compare sums of terms of one sign,
or multiply by what the magnitudes are. Where fewer than 8 operations lie between a number written by hand and its float32
value, 1e-6 is the bound without any probability: 8 * 2 u, as exp and log may be off by one unit in the last place, 2 u.

What is left is far below an error of the code: a wrong denominator, a token too many, a shifted mask or a missing rank
change a mean over n tokens by 1/n of it, 1e-2 in batches of a hundred tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from rlhf_core.config.models import InitModel
from rlhf_core.types import Column

UNIT_ROUNDOFF = 2.0**-24
LAMBDA = 6.0


def roundings(count: int) -> float:
    """Return how far two results of `count` roundings each may be apart, as a share of the magnitudes they add up.

    >>> f"{roundings(100):.1e}"
    '7.2e-06'
    """
    return 2 * LAMBDA * math.sqrt(count) * UNIT_ROUNDOFF


def of_model(shape: InitModel) -> float:
    """Return how far two log-probs, values or scores of such a model may be apart, as a share of 1 or of the larger of them.

    The roundings on the longest way through it. Per layer: norm, query, scores, weighted values, output, norm, gate, down;
    then the last norm, the head and the sum over the vocabulary.

    >>> tiny = InitModel(vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_positions=64)
    >>> f"{of_model(tiny):.1e}"
    '2.8e-05'
    """
    hidden = shape.hidden_size
    layer = 5 * hidden + hidden // shape.heads + shape.max_positions + shape.intermediate_size
    return roundings(shape.layers * layer + 2 * hidden + shape.vocab_size)


def of_training(shape: InitModel, *, steps: int) -> float:
    """Return how far losses, gradient norms and other means may be apart after `steps` updates, as a share of them.

    Each update is made of gradients that are off by `of_model`, and what it does to the next loss comes on top.
    """
    return steps * of_model(shape)


def assert_same_updates(
    one: Sequence[float], other: Sequence[float], *, shape: InitModel, rates: Sequence[float]
) -> None:
    """Compare weights after updates of Adam with these learning rates.

    Adam divides a gradient by its own size: where terms of a gradient cancel to hardly more than their rounding, that
    rounding is as large a part of the step as it is of the gradient. So single weights may differ by a hundredth of the way
    that Adam went at most, while over all weights the differences (root mean square) are those of the gradients.
    """
    way = sum(rates)
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert max(apart, default=0.0) <= way / 100
    assert math.sqrt(math.fsum(x * x for x in apart) / max(1, len(apart))) <= way * of_training(shape, steps=len(rates))


def assert_same_movement(own: Tensor, other: Tensor, start: Tensor, *, name: str) -> None:
    """Compare how far two trainings have moved a weight from `start`, where steps are proportional to gradients.

    A gradient that lacks a rank's part or counts it twice moves a weight by a share of its way that is no rounding; the
    weight itself hardly changes, so comparing weights would not see it. Gradients are sums with cancellation: their rounding
    may reach a hundredth of the largest, and writing a step into a weight rounds it by a unit of the weight, a few times.
    """
    way = float((other - start).abs().max())
    error = float((own - other).abs().max())
    allowed = way / 50 + 8 * UNIT_ROUNDOFF * float(other.abs().max())
    assert error <= allowed, f"{name}: {error:.1e} apart, {allowed:.1e} allowed, after a way of {way:.1e}"


def near(expected: Any, share: float) -> Any:
    """Return what equals `expected` but for floats, which may differ by `share` of them, or of 1 where they are smaller."""
    match expected:
        case float():
            return pytest.approx(expected, rel=share, abs=share)
        case Mapping():
            return {name: near(value, share) for name, value in expected.items()}
        case Column():
            return near(tuple(expected), share)
        case list() | tuple():
            return type(expected)(near(value, share) for value in expected)
        case other:
            return other
