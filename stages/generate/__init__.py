"""Declare and configure sampling: `generate` in the sections that sample."""

from typing import Annotated

from pydantic import Field

from rlhf_core.config.agents import AgentConfig, AgentName, AgentsBySource
from rlhf_core.config.engines import SamplingConfig
from rlhf_core.schema.base import OPERATIONAL, added_option
from rlhf_core.types import GenerationsRef, PolicyRef, PromptsRef
from stages import measured
from stages.declaration import From, stage


class GenerateConfig(AgentsBySource):
    """The number of answers to sample, and the settings of sampling."""

    samples_per_prompt: int = Field(8, ge=1)
    sampling: SamplingConfig = SamplingConfig()
    agent: AgentConfig | None = None
    """Agent that turns every answer into an episode of turns with an environment, tools or a program."""
    agents: dict[AgentName, AgentConfig] = added_option({})
    """Agents by name, each for the prompts of its `sources`; prompts of other sources are answered in one turn."""
    max_prompts: int = Field(0, ge=0)
    """Number of prompts to use, from the start; 0 uses all."""
    shard_size: Annotated[int, Field(ge=1), OPERATIONAL] = 128
    """Number of prompts per shard. A shard is sampled in one call; a killed run loses at most one."""
    round: int = Field(0, ge=0)
    """Salt of the seeds, so that each round of iterative DPO draws new answers."""


@stage(
    version=3,
    code="warn",
    engines=("sampler",),
    section="rejection_sampling.generate",
    metrics=measured.fixed(*measured.SAMPLES),
)
def generate(
    config: GenerateConfig,
    *,
    policy: Annotated[PolicyRef, From("sft")],
    prompts: Annotated[PromptsRef, From("prepare_data.prompts")],
    asked: Annotated[PromptsRef | None, From("")] = None,
) -> GenerationsRef:
    """Completions of `policy` for `prompts`. `asked`: reworded prompts to send instead (`conditional_sft/ask`)."""
