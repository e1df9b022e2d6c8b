"""Dr. GRPO: the distance to the group's mean, not divided by anything.

Formula: r - mean(r of the group).
Reference: arXiv 2503.20783, section 3.2.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered
from rlhf_core.algorithms.lazy_torch import Tensor


class DrGRPOAdvantage(GroupAdvantage):
    """Reward minus the group's mean: arXiv 2503.20783; its other half is `[ppo.loss] aggregation = "constant"`."""

    type: Literal["dr_grpo"] = "dr_grpo"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `group_centered` of the rewards."""
        return group_centered(groups.rewards)
