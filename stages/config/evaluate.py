"""The configuration of the evaluation: `[evaluate.evaluate]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.schema.base import OPERATIONAL, Config


class EvaluateConfig(Config):
    """What is measured, and what is compared with what."""

    gold: str = ""
    """The gold reward as `module:function` or `file.py:function`: list[Generation] -> list[float]; "" for none."""
    gold_timeout_s: Annotated[float, Field(gt=0), OPERATIONAL] = 600.0
    """Deadline of the gold reward for the answers of one policy."""
    reference: str = "sft"
    """The policy, by its name in the pipeline, that KL is measured to and, unless `parents` says otherwise, that win
    rates are against. When the reference handed in is another evaluated policy, that one's name is used."""
    parents: dict[str, str] = {}
    """Policy -> the policy that its win rate is against."""
    best_of: dict[str, int] = {}
    """Policy -> n: adds a row with the reward model's favourite of each prompt's first n answers."""
    level: float = Field(0.95, gt=0, lt=1)
    """Of the intervals."""
    resamples: int = Field(2000, ge=100)
    samples_shown: int = Field(16, ge=0)
    """Prompts that are shown side by side."""
