"""Declare and configure how rewards become part of the prompt: `[conditional_sft.condition]`."""

from typing import Annotated

from pydantic import Field, field_validator

from rlhf_core.schema.base import Config
from rlhf_core.types import ArtifactRef, PromptsRef, RolloutsRef
from stages import measured
from stages.declaration import From, stage


class ConditionConfig(Config):
    """The settings by which rewards become part of the prompt."""

    levels: int = Field(5, ge=2)
    """Number of reward quantiles; level 1 is the lowest. Equal rewards have equal levels, so some may be empty."""
    template: str = "{prompt}\n<reward: {level}>"
    """Template for the prompt's last message: {prompt} is its text, {level} the level."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts held out as `eval.parquet`: at least one prompt unless 0."""
    drop_truncated: bool = True
    """Whether answers cut off by the token limit are left out: as text they would teach the model to end there."""

    @field_validator("template")
    @classmethod
    def _check_template(cls, template: str) -> str:
        for place in ("{prompt}", "{level}"):
            if template.count(place) != 1:
                raise ValueError(f"must have {place} in it once; for example '{{prompt}} <reward: {{level}}>'")
        return template


@stage(
    version=1,
    code="strict",
    section="conditional_sft.condition",
    metrics=measured.fixed("prompts", "level", "level_*", *measured.SPLITS, "truncated", "invalid"),
)
def condition(
    config: ConditionConfig,
    *,
    rollouts: Annotated[RolloutsRef, From("score")],
    prompts: Annotated[PromptsRef | None, From("")] = None,
) -> ArtifactRef:
    """Demonstrations from `rollouts` whose prompts name the level of the answer, or `prompts` that request the best level."""
