"""MaxRL: the distance to the group's mean, in units of that mean; hard prompts weigh as in maximum likelihood.

Formula: (r - mean(r)) / mean(r) over the group, 0 where the mean is 0.
Reference: arXiv 2602.02710.
"""

# Shape legend: P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import ClassVar, Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered
from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.errors import DataError, explain


class MaxRLAdvantage(GroupAdvantage):
    """Reward minus the group's mean, over that mean: maximum likelihood of success, arXiv 2602.02710; rewards >= 0."""

    type: Literal["maxrl"] = "maxrl"

    divides_by_spread: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `mean_normalized` of the rewards."""
        return mean_normalized(groups.rewards)


def mean_normalized(rewards_PG: Tensor) -> Tensor:
    """Return (r - group mean) / group mean, 0 for groups of zeros: arXiv 2602.02710.

    With rewards 0 and 1 and K successes in a group of G, the mean over the group of A grad log pi is the mean of
    grad log pi over the successes minus its mean over all: in expectation the gradient of sum over k = 1..G - 1 of
    -(1 - p)^k / k, the first G - 1 terms of log p. (The G-th is what groups without a success would add, if grad log pi
    were subtracted in them, too.) DataError for rewards below 0, whose mean is no success rate.
    """
    if bool((rewards_PG < 0).any()):
        rule = "maxrl divides by the mean reward of a prompt, which must be a rate of success"
        least = float(rewards_PG.min())
        raise DataError(explain("reward", least, rule, "give rewards >= 0 (best 0 and 1), or use grpo"))
    centered_PG = group_centered(rewards_PG)
    mean_P1 = rewards_PG.mean(dim=1, keepdim=True)
    # arXiv 2602.02710: (r - mean) / mean; a group without a success has no gradient
    return torch.where(mean_P1 > 0, centered_PG / torch.where(mean_P1 > 0, mean_P1, 1.0), 0.0)
