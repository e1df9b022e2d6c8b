"""Declare and configure scoring: `score` in the sections that score."""

from collections.abc import Mapping
from typing import Annotated

from rlhf_core.config.rewards import Rewards, RewardsConfig
from rlhf_core.schema.base import Config
from rlhf_core.types import GenerationsRef, ModelRef, RolloutsRef
from stages import measured
from stages.declaration import From, stage


class ScoreConfig(Config):
    """The rewards for the answers."""

    rewards: Rewards = RewardsConfig()


@stage(
    version=4,
    code="warn",
    engines=("trainer",),
    section="rejection_sampling.score",
    page="score.md",
    metrics=measured.score,
)
def score(
    config: ScoreConfig,
    *,
    generations: Annotated[GenerationsRef, From("generate")],
    reward_models: Annotated[Mapping[str, ModelRef], From({"reward_model": "reward_model"})],
) -> RolloutsRef:
    """Rewards for `generations`; `reward_models` may be policies that judge."""
