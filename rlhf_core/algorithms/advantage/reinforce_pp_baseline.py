"""REINFORCE++-baseline: the group's mean is subtracted, and the result whitened over the step.

Formula: r - mean(r of the group), whitened.
Reference: arXiv 2501.03262.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import ClassVar, Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered
from rlhf_core.algorithms.lazy_torch import Tensor


class ReinforcePPBaselineAdvantage(GroupAdvantage):
    """Reward minus the group's mean, whitened over the step: REINFORCE++-baseline, arXiv 2501.03262."""

    type: Literal["reinforce++-baseline"] = "reinforce++-baseline"

    whitened: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `group_centered` of the rewards."""
        return group_centered(groups.rewards)
