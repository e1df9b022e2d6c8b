"""Declare and configure preference optimization: `[dpo]`, `[iterative_dpo.dpo]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rlhf_core.algorithms.preference.base import AnswerMethod
from rlhf_core.algorithms.preference.dpo import DPOLoss, ORPOLoss
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.exports import ExportingConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig, PreferenceLoss
from rlhf_core.schema.base import added_option
from rlhf_core.types import PolicyRef, PreferencesRef
from stages import measured
from stages.declaration import From, stage


class DPOConfig(ExportingConfig):
    """Preference optimization on pairs (kto, bco: also on single answers), against a frozen reference."""

    loss: PreferenceLoss = DPOLoss()
    nll_coef: float = Field(0.0, ge=0)
    """Weight of the chosen answer's mean token loss, added to the loss (RPO, arXiv 2404.19733)."""
    length_alpha: float = Field(1.0, ge=0, le=1)
    """Weight of tokens beyond the other answer's length, below 1 for LD-DPO (arXiv 2409.06411)."""
    max_length: int = Field(256, ge=8)
    export_every: int = added_option(0, ge=0)
    """Number of steps after which the policy is exported, each time: as the policies `<name>_<step>` of the section or of a
    step of a recipe, which are evaluated, too. It needs `loop.max_steps`. 0 exports the last policy alone."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-7)
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _check_pair_options(self) -> DPOConfig:
        if isinstance(self.loss, AnswerMethod) and self.nll_coef:
            raise ValueError(
                f"nll_coef = {self.nll_coef}: {self.loss.type} trains on single answers, not on pairs; leave it at 0"
            )
        if self.length_alpha < 1 and not self.loss.sums_logprobs:
            raise ValueError(
                f"length_alpha = {self.length_alpha}: applies only to losses on the summed log-probs of a pair, and "
                f"{self.loss.type!r} is not one of them; leave it at 1"
            )
        if isinstance(self.loss, ORPOLoss) and self.nll_coef:
            raise ValueError(
                f"nll_coef = {self.nll_coef}: orpo already includes the loss of the chosen answer; leave it at 0"
            )
        return self


@stage(
    version=3,
    code="warn",
    engines=("trainer",),
    section="iterative_dpo.dpo",
    page="dpo.md",
    metrics=measured.training("train_pairs", "dropped_pairs", "train_answers", "dropped_answers"),
)
def dpo(
    config: DPOConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    reference: Annotated[PolicyRef, From("sft", when=lambda config: config.loss.uses_reference, instead="policy")],
    preferences: Annotated[PreferencesRef, From("prepare_data.preferences")],
) -> PolicyRef:
    """Direct preference optimization of `policy` on `preferences`."""
