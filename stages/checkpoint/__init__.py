"""Declare and configure `checkpoint`."""

from typing import Annotated

from pydantic import Field

from rlhf_core.schema.base import Config
from rlhf_core.types import PolicyRef
from stages import measured
from stages.declaration import From, stage


class CheckpointConfig(Config):
    """The training step whose exported policy is used."""

    step: int = Field(ge=1)
    """A multiple of the training's `export_every`."""


@stage(version=1, code="strict", page="recipes.md", metrics=measured.fixed("step"))
def checkpoint(config: CheckpointConfig, *, policy: Annotated[PolicyRef, From("ppo")]) -> PolicyRef:
    """The policy after one step of the training of `policy`, which exported it (`export_every`)."""
