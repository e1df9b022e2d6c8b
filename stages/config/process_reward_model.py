"""The configuration of `[process_reward_model]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig, refuse_average
from rlhf_core.config.loop import LoopConfig
from rlhf_core.schema.base import Config


class ProcessRewardModelConfig(Config):
    """Process reward model on answers whose steps were judged."""

    max_length: int = Field(256, ge=8)
    """Tokens of prompt and answer; steps that end later are not judged, and answers without any left are dropped."""
    separator: str = Field("\n", min_length=1)
    """Stands between steps, here and in the answers that are scored later."""
    reduce: Literal["min", "mean", "last", "product"] = "min"
    """How the steps of an answer become its score, where the reward that uses this model does not say."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    @model_validator(mode="after")
    def _the_judged_weights_are_the_trained_ones(self) -> ProcessRewardModelConfig:
        refuse_average(self.optimizer)
        return self
