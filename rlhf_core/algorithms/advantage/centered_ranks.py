"""Centered ranks: the rank of a reward in its group, from -1/2 to 1/2.

Formula: sum over j of sign(r_i - r_j) / (2 (G - 1)).
Reference: rank transformation of returns: arXiv 1703.03864.
"""

# Shape legend: P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_size
from rlhf_core.algorithms.lazy_torch import Tensor


class CenteredRanksAdvantage(GroupAdvantage):
    """Rank of the reward in its group, centered: the size of a reward does not matter."""

    type: Literal["centered_ranks"] = "centered_ranks"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `centered_ranks` of the rewards."""
        return centered_ranks(groups.rewards)


def centered_ranks(rewards_PG: Tensor) -> Tensor:
    """Return advantages [P, G] in [-1/2, 1/2]; equal rewards have equal ranks, and a group of equal rewards has 0."""
    group = group_size(rewards_PG, "centered_ranks")
    above_PGG = (rewards_PG[:, :, None] - rewards_PG[:, None, :]).sign()
    return above_PGG.sum(dim=2) / (2 * (group - 1))
