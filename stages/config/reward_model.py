"""Configure `[reward_model]`."""

from __future__ import annotations

from pydantic import Field, model_validator

from rlhf_core.config.data import Suite
from rlhf_core.config.engines import OptimizerConfig, refuse_average
from rlhf_core.config.loop import LoopConfig
from rlhf_core.schema.base import Config, added_option


class RewardModelConfig(Config):
    """Training of a Bradley-Terry reward model on preference pairs."""

    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of prompt and answer; pairs identical after truncation are dropped and counted."""
    use_margin: bool = False
    """Whether the pair's `margin` column is subtracted inside the sigmoid."""
    centering_coef: float = Field(0.0, ge=0)
    """Weight of the term that pulls the mean score to zero (arXiv 2312.09244); 0.01 is a common value."""
    probe_answers: int = added_option(64, ge=0)
    """Number of held-out chosen answers that are edited by rule, to measure what the reward model is swayed by; 0: none."""
    suites: dict[str, Suite] = added_option({})
    """Suites of chosen and rejected answers by name, local files, on which accuracy is reported by subset."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)

    @model_validator(mode="after")
    def _the_judged_weights_are_the_trained_ones(self) -> RewardModelConfig:
        refuse_average(self.optimizer)
        return self
