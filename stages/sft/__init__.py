"""Declare and configure supervised fine-tuning: `[sft]`, `[rejection_sampling.sft]`, `[conditional_sft.sft]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.exports import ExportingConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import added_option
from rlhf_core.types import DemonstrationsRef, PolicyRef
from stages import measured
from stages.declaration import From, stage


class SFTConfig(ExportingConfig):
    """Supervised fine-tuning on demonstrations."""

    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of a conversation; longer ones are cut, and dropped if no trained token is left."""
    packing: bool = False
    """Whether conversations share rows of `max_length` tokens; attention and positions do not leak. Refused for
    architectures that are not known to keep conversations apart."""
    loss: Literal["nll", "dft"] = "nll"
    train_on: Literal["assistant", "all"] = "assistant"
    """Tokens to train on; `all` means every token but the first, including prompts and the template's own tokens."""
    window_overlap: int = added_option(0, ge=0)
    """Above 0, with `train_on = "all"`: longer documents are not cut, but trained in windows of `max_length` tokens.
    Each window begins with this many of the last tokens of the previous window, as context: no token is trained on
    twice."""
    export_every: int = added_option(0, ge=0)
    """Number of steps after which the model is exported, each time: as the policies `<name>_<step>` of a section or a step of
    a recipe, which are evaluated, too. It needs `loop.max_steps`. 0 exports the last model alone."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=2)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _check_windows(self) -> SFTConfig:
        given = f"window_overlap = {self.window_overlap}"
        if self.window_overlap and self.train_on != "all":
            raise ValueError(f"{given}: windows begin inside of answers; set train_on = 'all', or leave it at 0")
        if self.window_overlap >= self.max_length:
            raise ValueError(f"{given}: must be < max_length = {self.max_length}; lower it")
        return self


@stage(
    version=2,
    code="warn",
    engines=("trainer",),
    section="sft",
    metrics=measured.training("train_samples", "train_documents", "dropped_answers"),
)
def sft(
    config: SFTConfig,
    *,
    policy: Annotated[PolicyRef, From("prepare_data.base")],
    demonstrations: Annotated[DemonstrationsRef, From("prepare_data.demonstrations")],
) -> PolicyRef:
    """Supervised fine-tuning of `policy` on `demonstrations`."""
