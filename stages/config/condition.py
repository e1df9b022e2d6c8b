"""How rewards become part of the prompt: `[conditional_sft.condition]`."""

from __future__ import annotations

from pydantic import Field, field_validator

from rlhf_core.schema.base import Config


class ConditionConfig(Config):
    """How rewards become part of the prompt."""

    levels: int = Field(5, ge=2)
    """Quantiles of the rewards; level 1 is the lowest. Equal rewards have equal levels, so some may stay empty."""
    template: str = "{prompt}\n<reward: {level}>"
    """What becomes of the prompt's last message: {prompt} is its text, {level} the level."""
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts held out as `eval.parquet`: at least one prompt unless 0."""
    drop_truncated: bool = True
    """Leave out answers that the token limit cut off: as text they would be taught to end there."""

    @field_validator("template")
    @classmethod
    def _has_both_places(cls, template: str) -> str:
        for place in ("{prompt}", "{level}"):
            if template.count(place) != 1:
                raise ValueError(f"must have {place} in it once; for example '{{prompt}} <reward: {{level}}>'")
        return template
