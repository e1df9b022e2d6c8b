"""Group relative policy optimization: the standard score of a reward in its group.

Formula: (r - mean(r)) / (std(r) + eps), over the group; with std = "batch" the std is that of all rewards of the step.
Reference: arXiv 2402.03300, section 4.1.2; batch: arXiv 2508.08221.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered, group_size
from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.schema.base import added_option


class GRPOAdvantage(GroupAdvantage):
    """Reward minus the group's mean, over its standard deviation: arXiv 2402.03300."""

    type: Literal["grpo"] = "grpo"
    eps: float = Field(1e-6, gt=0)
    std: Literal["group", "batch"] = added_option("group")
    """Rewards of the standard deviation: `batch` is all rewards of the step (arXiv 2508.08221), so that a group
    of nearly equal rewards is not blown up; `dr_grpo` divides by nothing."""

    divides_by_spread: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `group_normalized` of the rewards, or `batch_normalized`."""
        normalized = group_normalized if self.std == "group" else batch_normalized
        return normalized(groups.rewards, eps=self.eps)


def group_normalized(rewards_PG: Tensor, *, eps: float) -> Tensor:
    """Return (r - group mean) / (group std + eps): GRPO, arXiv 2402.03300, section 4.1.2.

    The standard deviation is the sample's (divisor G - 1), as in the published implementations.
    """
    group_size(rewards_PG, "group_normalized")
    advantages_PG = group_centered(rewards_PG)
    # arXiv 2402.03300, section 4.1.2: (r - mean) / std
    return advantages_PG / (advantages_PG.std(dim=1, keepdim=True) + eps)


def batch_normalized(rewards_PG: Tensor, *, eps: float) -> Tensor:
    """Return (r - group mean) / (std of all P G rewards + eps): arXiv 2508.08221.

    The sample's standard deviation (divisor P G - 1) of the rewards themselves. Pass the whole step at once.
    """
    group_size(rewards_PG, "batch_normalized")
    # arXiv 2508.08221: the mean of the group, the standard deviation of the batch
    return group_centered(rewards_PG) / (rewards_PG.std() + eps)
