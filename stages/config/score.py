"""The configuration of scoring: `score` in the sections that score."""

from __future__ import annotations

from rlhf_core.config.rewards import RewardsConfig
from rlhf_core.schema.base import Config


class ScoreConfig(Config):
    """What the answers are rewarded for."""

    rewards: RewardsConfig = RewardsConfig()
