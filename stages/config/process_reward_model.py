"""Configure `[process_reward_model]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig, refuse_average
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import Config, added_option


class ProcessRewardModelConfig(Config):
    """Training of a process reward model on answers whose steps were judged."""

    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of prompt and answer; steps that end later are not judged, and answers without steps are
    dropped."""
    separator: str = Field("\n", min_length=1)
    """Separator between steps, both here and in the answers that are scored later."""
    reduce: Literal["min", "mean", "last", "product"] = "min"
    """Reduction of an answer's step probabilities to its score, if the reward that uses this model sets none."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    lora: LoraConfig | None = added_option(None)

    @model_validator(mode="after")
    def _check_best_weights(self) -> ProcessRewardModelConfig:
        refuse_average(self.optimizer)
        return self
