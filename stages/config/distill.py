"""The configuration of distillation: `[distill]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import LoraConfig, OptimizerConfig, SamplingConfig
from rlhf_core.config.loop import LoopConfig
from rlhf_core.schema.base import Config


class DivergenceConfig(Config):
    """How far the student is from the teacher at a token."""

    kind: Literal["forward", "reverse", "jsd"] = "forward"
    """`forward` covers what the teacher says, `reverse` seeks its likeliest, `jsd` lies between them."""
    jsd_beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture of `jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Of both distributions; not that of the sampling."""
    top_k: int = Field(64, ge=0)
    """The teacher's likeliest tokens, all others counting as one; 0 takes the whole vocabulary, at its price."""


class DistillConfig(Config):
    """Distillation of a teacher into a student with the same vocabulary."""

    divergence: DivergenceConfig = DivergenceConfig()
    kl_weight: float = Field(1.0, ge=0, le=1)
    """a of the loss: what is left of 1 weighs the imitation of the demonstrations' tokens."""
    on_policy: bool = False
    """Learn on the student's own answers to prompts instead of on demonstrations."""
    sampling: SamplingConfig = SamplingConfig()
    """Of the student's own answers."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts that are held out for evaluation, where the data are prompts."""
    max_length: int = Field(256, ge=8)
    """Tokens of a demonstration; longer ones are cut, and dropped if no trained token is left."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    """Of `epochs`, each has an answer of its own to every prompt."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _own_answers_are_not_imitated(self) -> DistillConfig:
        if self.on_policy and self.kl_weight < 1:
            raise ValueError(
                f"kl_weight = {self.kl_weight}: on_policy has the student's own answers, which are nothing to imitate; "
                "leave it at 1"
            )
        return self
