"""Declare and configure `[process_reward_model]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig, refuse_average
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import PolicyRef, ProcessRewardModelRef, StepsRef
from stages import measured
from stages.declaration import From, stage


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


@stage(
    version=3,
    code="warn",
    engines=("trainer",),
    section="process_reward_model",
    page="reward_model.md",
    metrics=measured.process_reward_model,
)
def process_reward_model(
    config: ProcessRewardModelConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    steps: Annotated[StepsRef, From("prepare_data.steps")],
) -> ProcessRewardModelRef:
    """A model from the weights of `policy` that judges the steps of an answer, on judged `steps`."""
