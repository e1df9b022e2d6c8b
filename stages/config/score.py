"""Configure scoring: `score` in the sections that score."""

from rlhf_core.config.rewards import Rewards, RewardsConfig
from rlhf_core.schema.base import Config


class ScoreConfig(Config):
    """The rewards for the answers."""

    rewards: Rewards = RewardsConfig()
