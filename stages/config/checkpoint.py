"""Configure `checkpoint`."""

from pydantic import Field

from rlhf_core.schema.base import Config


class CheckpointConfig(Config):
    """The step of a training whose policy is taken."""

    step: int = Field(ge=1)
    """A multiple of the training's `export_every`."""
