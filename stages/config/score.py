"""The configuration of scoring: `score` in the sections that score."""

from __future__ import annotations

from rlhf_core.config.base import Config
from rlhf_core.config.rewards import RewardsConfig


class ScoreConfig(Config):
    """What the answers are rewarded for."""

    rewards: RewardsConfig = RewardsConfig()
