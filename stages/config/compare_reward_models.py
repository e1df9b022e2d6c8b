"""Configure the comparison of reward models on the same pairs."""

from typing import Literal

from rlhf_core.config.data import Suite
from rlhf_core.schema.base import Config, added_option


class CompareRewardModelsConfig(Config):
    """The pairs on which the reward models are compared."""

    split: Literal["eval", "all"] = "eval"
    """Which pairs: the held-out ones, or all of them, for reward models that were trained on none of these."""
    suites: dict[str, Suite] = added_option({})
    """Suites of chosen and rejected answers by name, local files, on which accuracy is reported by subset."""
