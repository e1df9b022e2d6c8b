"""Group relative policy optimization: the standard score of a reward in its group.

Formula: (r - mean(r)) / (std(r) + eps), over the group.
Reference: arXiv 2402.03300, section 4.1.2.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered, group_size
from rlhf_core.algorithms.lazy_torch import Tensor


class GRPOAdvantage(GroupAdvantage):
    """Reward minus the group's mean, over its standard deviation: arXiv 2402.03300."""

    type: Literal["grpo"] = "grpo"
    eps: float = Field(1e-6, gt=0)

    divides_by_spread: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `group_normalized` of the rewards."""
        return group_normalized(groups.rewards, eps=self.eps)


def group_normalized(rewards_PG: Tensor, *, eps: float) -> Tensor:
    """Return (r - group mean) / (group std + eps): GRPO, arXiv 2402.03300, section 4.1.2.

    The standard deviation is the sample's (divisor G - 1), as in the published implementations.
    """
    group_size(rewards_PG, "group_normalized")
    advantages_PG = group_centered(rewards_PG)
    # arXiv 2402.03300, section 4.1.2: (r - mean) / std
    return advantages_PG / (advantages_PG.std(dim=1, keepdim=True) + eps)
