"""Merges of models with the same start: a formula for each tensor, over the same tensor of every model.

Legend: M models with weights w_m, theta_m their values, theta_0 the base's values, delta_m = theta_m - theta_0.
"""

import math
import operator
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.algorithms.token_math import Tensor, loaded_torch
from rlhf_core.schema.base import Config

PARALLEL = 0.9995
"""Cosine from which two tensors count as parallel: the sine of their angle, by which `slerp` divides, is below 0.032."""


def added(tensors: Iterable[Tensor]) -> Tensor:
    """Sum tensors."""
    return reduce(operator.add, tensors)


class LinearMerge(Config):
    """The weighted mean of the models ("model soups").

    Formula: sum_m w_m theta_m / sum_m w_m.
    Reference: arXiv 2203.05482.
    """

    type: Literal["linear"] = "linear"

    def merged(self, theta_M: Sequence[Tensor], weights_M: Sequence[float], base: Tensor | None, seed: int) -> Tensor:
        """Merge the tensors to one of the shape of each of `theta_M`."""
        total = sum(weights_M)
        return added(weight / total * theta for weight, theta in zip(weights_M, theta_M, strict=True))


class SlerpMerge(Config):
    """Spherical interpolation between two models, which keeps the norm that a mean of different directions loses.

    Formula: (sin((1 - t) a) theta_1 + sin(t a) theta_2) / sin a, with a the angle between them and t = w_2 / (w_1 + w_2).
    Reference: Shoemake, "Animating rotation with quaternion curves", 1985.
    """

    type: Literal["slerp"] = "slerp"

    def merged(self, theta_M: Sequence[Tensor], weights_M: Sequence[float], base: Tensor | None, seed: int) -> Tensor:
        """Merge two tensors; parallel tensors, and tensors of zeros, are interpolated linearly."""
        first, second = theta_M
        t = weights_M[1] / sum(weights_M)
        norms = first.norm() * second.norm()
        cosine = float((first * second).sum() / norms) if float(norms) else 1.0
        if abs(cosine) > PARALLEL:
            return (1 - t) * first + t * second
        angle = math.acos(cosine)
        return (math.sin((1 - t) * angle) * first + math.sin(t * angle) * second) / math.sin(angle)


class OfChanges(Config):
    """Base of the merges that combine changes from a base model."""

    scale: float = 1.0
    """Factor lambda of the merged change."""
    density: float = Field(1.0, gt=0, le=1)
    """Share of the values of each tensor's change that are kept; the others are set to 0."""
    drop: Literal["smallest", "random"] = "smallest"
    """Which values are set to 0. With `random`, the remaining ones are divided by `density`, so that a change keeps its
    expected value (DARE, arXiv 2311.03099)."""

    def kept(self, change: Tensor, seed: int) -> Tensor:
        """Set the dropped values of a change to 0."""
        torch = loaded_torch()
        if self.density == 1:
            return change
        if self.drop == "random":
            kept = torch.rand(change.shape, generator=torch.Generator().manual_seed(seed)) < self.density
            return change * kept / self.density
        count = max(1, int(self.density * change.numel()))
        largest = change.abs().flatten().topk(count).indices
        return torch.zeros_like(change).flatten().scatter(0, largest, change.flatten()[largest]).view_as(change)

    def weighted(self, theta_M: Sequence[Tensor], weights_M: Sequence[float], base: Tensor, seed: int) -> list[Tensor]:
        """The changes w_m delta_m of each model; `seed` decides the values that are dropped at random."""
        each = enumerate(zip(weights_M, theta_M, strict=True))
        return [weight * self.kept(theta - base, seed + number) for number, (weight, theta) in each]


class TaskArithmeticMerge(OfChanges):
    """The base plus the weighted sum of the models' changes; with `drop = "random"` and a `density` DARE.

    Formula: theta_0 + lambda sum_m w_m delta_m.
    Reference: arXiv 2212.04089.
    """

    type: Literal["task_arithmetic"] = "task_arithmetic"

    def merged(self, theta_M: Sequence[Tensor], weights_M: Sequence[float], base: Tensor | None, seed: int) -> Tensor:
        """Merge the tensors."""
        assert base is not None
        return base + self.scale * added(self.weighted(theta_M, weights_M, base, seed))


class TiesMerge(OfChanges):
    """The base plus the mean of the changes that agree with the sign of their weighted sum.

    Formula: theta_0 + lambda sum_m s_m w_m delta_m / sum_m s_m w_m, s_m = [delta_m has the sign of sum_m w_m delta_m]. With
    `drop = "random"` the divisor is sum_m w_m: `density` already divides the remaining values.
    Reference: arXiv 2306.01708.
    """

    type: Literal["ties"] = "ties"
    density: float = Field(0.5, gt=0, le=1)

    def merged(self, theta_M: Sequence[Tensor], weights_M: Sequence[float], base: Tensor | None, seed: int) -> Tensor:
        """Merge the tensors."""
        assert base is not None
        changes = self.weighted(theta_M, weights_M, base, seed)
        positive = added(changes) >= 0
        agree = [((change > 0) & positive) | ((change < 0) & ~positive) for change in changes]
        total = added(change * same for change, same in zip(changes, agree, strict=True))
        if self.drop == "random":
            return base + self.scale * total / sum(weights_M)
        divisor = added(weight * same for weight, same in zip(weights_M, agree, strict=True))
        return base + self.scale * total / divisor.masked_fill(divisor == 0, 1.0)


Merge = Annotated[LinearMerge | SlerpMerge | TaskArithmeticMerge | TiesMerge, Field(discriminator="type")]
