"""Declare and configure distillation: `[distill]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.config.policy import LoopConfig, check_best
from rlhf_core.config.teachers import TeacherName, TeacherOptions, Weight
from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import DemonstrationsRef, PolicyRef, PromptsRef
from stages import measured
from stages.declaration import From, stage


class DivergenceConfig(Config):
    """The divergence between student and teacher at a token."""

    kind: Literal["forward", "reverse", "jsd", "uld", "uld_text"] = "forward"
    """Kind of divergence: `forward` covers the teacher's distribution, `reverse` seeks its mode, `jsd` is in between.
    For teachers with other tokenizers: `uld` compares sorted probabilities (arXiv 2402.12030), `uld_text` also the
    probabilities of the text itself."""
    jsd_beta: float = Field(0.5, ge=0, le=1)
    """Weight of the teacher in the mixture of `jsd`."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of both distributions; independent of the sampling temperature."""
    top_k: int = Field(64, ge=0)
    """Number of the teacher's likeliest tokens, or outcomes for `uld`; all others count as one. 0 uses the whole
    vocabulary, at its cost."""


class DistillConfig(TeacherOptions):
    """Distillation of one or several teachers into a student."""

    divergence: DivergenceConfig = DivergenceConfig()
    kl_weight: float = Field(1.0, ge=0, le=1)
    """Weight a of the divergence in the loss; 1 - a weights the cross-entropy on the demonstrations' tokens."""
    teachers: dict[TeacherName, Weight] = added_option({})
    """Weights of several teachers by name, in the place of `teacher`; they are divided by their sum, and 0 only measures.
    The loss is the weighted sum of the divergences (arXiv 1503.02531, section 1)."""
    route: dict[TeacherName, tuple[str, ...]] = added_option({})
    """Sources of the prompts that each of the `teachers` teaches alone: `{math = ["gsm8k"], desk = ["support"]}`. Every source
    has one teacher, so weights are equal."""
    on_policy: bool = False
    """Whether the student learns on its own answers to prompts instead of on demonstrations."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of the student's own answers."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts held out for evaluation, if the data are prompts."""
    max_length: int = Field(256, ge=8)
    """Maximum number of tokens of a demonstration, in each tokenizer; longer ones are cut, and dropped if no trained token
    is left."""
    loop: LoopConfig = LoopConfig(batch_size=32, epochs=1)
    """Training loop; with `on_policy` every epoch draws a new answer to every prompt."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _check_on_policy_loss(self) -> DistillConfig:
        if self.on_policy and self.kl_weight < 1:
            raise ValueError(
                f"kl_weight = {self.kl_weight}: with on_policy the answers are the student's own, so there is nothing to imitate; "
                "leave it at 1"
            )
        return self

    @model_validator(mode="after")
    def _check_keep_best(self) -> DistillConfig:
        if self.on_policy:
            check_best("eval_fraction", self.eval_fraction, {"loop": self.loop})
        return self

    @model_validator(mode="after")
    def _check_routed_divergence(self) -> DistillConfig:
        if self.route and self.divergence.kind in ("uld", "uld_text"):
            raise ValueError(
                f"route = {{...}}: {self.divergence.kind} compares with all teachers; choose another divergence.kind"
            )
        return self

    @model_validator(mode="after")
    def _check_uld_mix(self) -> DistillConfig:
        if self.divergence.kind == "uld" and self.kl_weight == 1:
            instead = "" if self.on_policy else "lower kl_weight, or "
            raise ValueError(
                "kl_weight = 1.0: divergence.kind = 'uld' compares sorted probabilities, not tokens; "
                f'{instead}set divergence.kind = "uld_text"'
            )
        return self


@stage(
    version=2,
    code="warn",
    engines=("trainer", "sampler"),
    section="distill",
    page="distill.md",
    metrics=measured.training("train_samples"),
)
def distill(
    config: DistillConfig,
    *,
    policy: Annotated[PolicyRef, From("prepare_data.base")],
    teacher: Annotated[PolicyRef | None, From("ppo", when=lambda config: not config.teachers)] = None,
    teachers: Annotated[
        Mapping[str, PolicyRef] | None, From({"sft": "sft", "ppo": "ppo"}, when=lambda config: bool(config.teachers))
    ] = None,
    demonstrations: Annotated[
        DemonstrationsRef | None, From("prepare_data.demonstrations", when=lambda config: not config.on_policy)
    ] = None,
    prompts: Annotated[PromptsRef | None, From("prepare_data.prompts", when=lambda config: config.on_policy)] = None,
) -> PolicyRef:
    """Distillation of `teacher`, or of all `teachers` that have a weight in `config.teachers`, into `policy`; on `prompts` if `config.on_policy`, else on `demonstrations`."""
