"""Configure supervised fine-tuning: `[sft]`, `[rejection_sampling.sft]`, `[conditional_sft.sft]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.exports import check_loop_exports, steps_exported
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.schema.base import Config, added_option


class SFTConfig(Config):
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
    """Above 0, with `train_on = "all"`: longer documents are not cut, but trained in windows of `max_length` tokens. A window
    begins with so many of the last tokens of the one before, as context: no token is trained on twice."""
    export_every: int = added_option(0, ge=0)
    """Number of steps after which the model is exported, each time: as the policies `<name>_<step>` of a section or a step of
    a recipe, which are evaluated, too. It needs `loop.max_steps`. 0 exports the last model alone."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=2)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    lora: LoraConfig | None = None

    @property
    def exported_steps(self) -> tuple[int, ...]:
        """Return the steps after which the model is exported, without the last one."""
        return steps_exported(self.export_every, self.loop.max_steps)

    @model_validator(mode="after")
    def _check_exports(self) -> SFTConfig:
        check_loop_exports(self.export_every, self.loop.max_steps)
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> SFTConfig:
        given = f"window_overlap = {self.window_overlap}"
        if self.window_overlap and self.train_on != "all":
            raise ValueError(f"{given}: windows begin inside of answers; set train_on = 'all', or leave it at 0")
        if self.window_overlap >= self.max_length:
            raise ValueError(f"{given}: must be < max_length = {self.max_length}; lower it")
        return self
