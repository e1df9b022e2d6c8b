"""Declare and configure `merge`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.algorithms.merging import LinearMerge, Merge, OfChanges, SlerpMerge
from rlhf_core.config.teachers import TeacherName, toml
from rlhf_core.schema.base import Config
from rlhf_core.types import PolicyRef
from stages import measured
from stages.declaration import From, stage


class MergeConfig(Config):
    """Which policies are merged, and how."""

    weights: dict[TeacherName, Annotated[float, Field(gt=0)]] = Field(min_length=2)
    """Weight of each policy by name."""
    method: Merge = LinearMerge()

    @property
    def uses_base(self) -> bool:
        """Whether the changes from a base are merged."""
        return isinstance(self.method, OfChanges)

    @model_validator(mode="after")
    def _check_sum(self) -> MergeConfig:
        if not math.isfinite(sum(self.weights.values())):
            raise ValueError(f"weights = {toml(self.weights)}: their sum is too large; give smaller ones")
        return self

    @model_validator(mode="after")
    def _check_two(self) -> MergeConfig:
        if isinstance(self.method, SlerpMerge) and len(self.weights) != 2:
            raise ValueError(
                f"weights = {{...}}: slerp interpolates between two policies, and there are {len(self.weights)}; "
                "merge two of them first, or choose another method"
            )
        return self


@stage(version=1, code="warn", page="recipes.md", metrics=measured.fixed("tensors", "parameters"))
def merge(
    config: MergeConfig,
    *,
    policies: Annotated[Mapping[str, PolicyRef], From({"sft": "sft", "ppo": "ppo"})],
    base: Annotated[PolicyRef | None, From("prepare_data.base", when=lambda config: config.uses_base)] = None,
) -> PolicyRef:
    """The merge of `policies`, or of their changes from `base`, into one policy."""
