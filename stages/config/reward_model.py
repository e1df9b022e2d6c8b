"""The configuration of `[reward_model]`."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig, refuse_average
from rlhf_core.config.loop import LoopConfig
from rlhf_core.schema.base import Config


class RewardModelConfig(Config):
    """Bradley-Terry reward model on preference pairs."""

    max_length: int = Field(256, ge=8)
    """Tokens of prompt and answer; pairs that are identical after truncation are dropped and counted."""
    use_margin: bool = False
    """Subtract the pair's `margin` column inside the sigmoid."""
    centering_coef: float = Field(0.0, ge=0)
    """Pulls the mean score to zero (arXiv 2312.09244); 0.01 is a common value."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    @model_validator(mode="after")
    def _the_judged_weights_are_the_trained_ones(self) -> RewardModelConfig:
        refuse_average(self.optimizer)
        return self
