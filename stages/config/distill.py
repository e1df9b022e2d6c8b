"""Configure distillation: `[distill]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import LoraConfig, OptimizerConfig, SamplingConfig
from rlhf_core.config.loop import LoopConfig
from rlhf_core.schema.base import Config


class DivergenceConfig(Config):
    """The divergence between student and teacher at a token."""

    kind: Literal["forward", "reverse", "jsd"] = "forward"
    """Kind of divergence: `forward` covers the teacher's distribution, `reverse` seeks its mode, `jsd` is in between."""
    jsd_beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture of `jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions; independent of the sampling temperature."""
    top_k: int = Field(64, ge=0)
    """Number of the teacher's likeliest tokens; all others count as one. 0 uses the whole vocabulary, at its cost."""


class DistillConfig(Config):
    """Distillation of a teacher into a student with the same vocabulary."""

    divergence: DivergenceConfig = DivergenceConfig()
    kl_weight: float = Field(1.0, ge=0, le=1)
    """Weight a of the divergence in the loss; 1 - a weights the cross-entropy on the demonstrations' tokens."""
    on_policy: bool = False
    """Whether the student learns on its own answers to prompts instead of on demonstrations."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of the student's own answers."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts held out for evaluation, if the data are prompts."""
    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of a demonstration; longer ones are cut, and dropped if no trained token is left."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    """Training loop; with `on_policy` every epoch draws a new answer to every prompt."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _own_answers_are_not_imitated(self) -> DistillConfig:
        if self.on_policy and self.kl_weight < 1:
            raise ValueError(
                f"kl_weight = {self.kl_weight}: with on_policy the answers are the student's own, so there is nothing to imitate; "
                "leave it at 1"
            )
        return self
