"""Options of `order = "band"`: which prompts of a policy optimization come first."""

from typing import Self

from pydantic import Field, model_validator

from rlhf_core.schema.base import Config


class RewardBand(Config):
    """The prompts that are neither too easy nor too hard for the current policy, by the mean reward of answers."""

    term: str = ""
    """Term of the rewards whose mean counts, such as a term that is 1 for a right answer; the reward itself if empty.
    """
    low: float = 0.1
    """Least mean of a prompt in the band."""
    high: float = 0.9
    """Largest mean of a prompt in the band."""
    again: float = Field(0.1, ge=0, le=1)
    """Share of the prompts of each step that are taken from outside of the band, the longest unanswered first, because
    the policy changes. If the band has too few prompts, the share is larger."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low}: must be at most high = {self.high}; swap them")
        return self
