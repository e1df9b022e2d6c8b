"""Declare and configure `[reward_model]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.data import Suite
from rlhf_core.config.engines import OptimizerConfig, refuse_average
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import PolicyRef, PreferencesRef, RewardModelRef
from stages import measured
from stages.declaration import From, stage
from stages.suites import suite_digests


class Member(Config):
    """One member of an ensemble, by its difference from the others."""

    number: int = Field(ge=1)
    """Number of the member, from 1."""
    of: int = Field(ge=2)
    """Number of members."""
    by: Literal["seeds", "folds"] = "seeds"
    """Difference of the members: the seed of the head and of the order alone (`seeds`), or also which of `of` folds of the prompts the
    member is not trained on (`folds`)."""

    @model_validator(mode="after")
    def _check_number(self) -> Member:
        if self.number > self.of:
            raise ValueError(f"number = {self.number}: there are {self.of} members; give one of 1 to {self.of}")
        return self


class RewardModelConfig(Config):
    """Training of a Bradley-Terry reward model on preference pairs."""

    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of prompt and answer; pairs identical after truncation are dropped and counted."""
    use_margin: bool = False
    """Whether the pair's `margin` column is subtracted inside the sigmoid."""
    centering_coef: float = Field(0.0, ge=0)
    """Weight of the term that pulls the mean score to zero (arXiv 2312.09244); 0.01 is a common value."""
    probe_answers: int = added_option(64, ge=0)
    """Number of held-out chosen answers that are edited by rule, to measure the biases of the reward model; 0: none."""
    suites: dict[str, Suite] = added_option({})
    """Suites of chosen and rejected answers by name, local files, on which accuracy is reported by subset."""
    member: Member | None = added_option(None)
    """The member of an ensemble that is trained; `[reward_model.ensemble]` of a profile sets it."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    lora: LoraConfig | None = added_option(None)

    @model_validator(mode="after")
    def _check_best_weights(self) -> RewardModelConfig:
        refuse_average(self.optimizer)
        return self


@stage(
    version=3,
    code="warn",
    engines=("trainer",),
    section="reward_model",
    page="reward_model.md",
    metrics=measured.reward_model,
    files=suite_digests,
)
def reward_model(
    config: RewardModelConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    preferences: Annotated[PreferencesRef, From("prepare_data.preferences")],
) -> RewardModelRef:
    """A reward model from the weights of `policy`, on `preferences`."""
