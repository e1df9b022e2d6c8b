"""Configure how rewards become part of the prompt: `[conditional_sft.condition]`."""

from pydantic import Field, field_validator

from rlhf_core.schema.base import Config


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
