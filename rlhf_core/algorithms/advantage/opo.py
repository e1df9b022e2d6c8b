"""OPO: on-policy RL with the optimal baseline, the mean weighted by length.

Formula: r - b, b = sum(l r) / sum(l) over the group, l the lengths.
Reference: arXiv 2505.23585.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_size
from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.errors import DataError, explain


class OPOAdvantage(GroupAdvantage):
    """Reward minus the group's length-weighted mean, the baseline of least variance: arXiv 2505.23585."""

    type: Literal["opo"] = "opo"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `opo` of rewards and lengths."""
        return opo(groups.rewards, groups.lengths)


def opo(rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Return r - b, b = sum(l r) / sum(l) over the group: the optimal baseline of OPO, arXiv 2505.23585.

    `lengths_PG` counts the completions' tokens: the squared norm of a completion's gradient is taken to grow with them.
    Equal rewards give exactly 0, as in `group_centered`. Raises DataError for a group without tokens.
    """
    group_size(rewards_PG, "opo")
    tokens_P1 = lengths_PG.sum(dim=1, keepdim=True)
    if bool((tokens_P1 <= 0).any()):
        rule = "the baseline is a mean weighted by length"
        raise DataError(explain("lengths", 0, rule, "drop prompts whose completions are all empty"))
    offset_PG = rewards_PG - rewards_PG[:, :1]
    # arXiv 2505.23585: r - sum(l r) / sum(l)
    return offset_PG - (lengths_PG * offset_PG).sum(dim=1, keepdim=True) / tokens_P1
