"""REINFORCE leave-one-out.

Formula: r_i - mean(the other rewards of the group) = G / (G - 1) * (r_i - mean(r)).
Reference: arXiv 2402.14740.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered, group_size
from rlhf_core.algorithms.lazy_torch import Tensor


class RLOOAdvantage(GroupAdvantage):
    """Reward minus the mean of the others of its group: arXiv 2402.14740."""

    type: Literal["rloo"] = "rloo"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `leave_one_out` of the rewards."""
        return leave_one_out(groups.rewards)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Return r_i - mean of the other rewards of its group: RLOO, arXiv 2402.14740.

    That is G / (G - 1) times the distance to the mean of the whole group.
    """
    group = group_size(rewards_PG, "leave_one_out")
    # arXiv 2402.14740: r_i - mean of the others = G / (G - 1) * (r_i - mean of all)
    return group_centered(rewards_PG) * (group / (group - 1))
