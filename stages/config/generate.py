"""The configuration of sampling: `generate` in the sections that sample."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.agents import AgentConfig
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.schema.base import OPERATIONAL, Config


class GenerateConfig(Config):
    """How many answers are drawn, and how."""

    samples_per_prompt: int = Field(8, ge=1)
    sampling: SamplingConfig = SamplingConfig()
    agent: AgentConfig | None = None
    """Makes every answer an episode of turns with an environment, tools or an agent program."""
    max_prompts: int = Field(0, ge=0)
    """Takes this many prompts from the start; 0 takes all."""
    shard_size: Annotated[int, Field(ge=1), OPERATIONAL] = 128
    """Prompts per shard, sampled in one call: what a killed run loses at most."""
    round: int = Field(0, ge=0)
    """Salt of the seeds, so that each round of iterative DPO draws anew."""
