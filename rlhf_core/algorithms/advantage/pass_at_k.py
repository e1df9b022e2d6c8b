"""Pass@k training: the advantage of an answer when k of the group are drawn and one success is enough.

Formula: passed: (1 - R) / s; failed: (1 - R - C(N - 1, k - 1) / C(G - 1, k - 1)) / s; R = 1 - C(N, k) / C(G, k), s^2 = R (1 - R), N failures.
Reference: arXiv 2508.10751.
"""

# Shape legend: P prompts, G completions of a prompt (the group).

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_size
from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.errors import ConfigError, explain


class PassAtKAdvantage(GroupAdvantage):
    """Rewards the group for one success in k answers, so that prompts are explored longer: arXiv 2508.10751."""

    type: Literal["pass@k"] = "pass@k"
    k: int = Field(4, ge=1)
    """Number of answers of which one has to pass; at most `samples_per_prompt`."""
    threshold: float = 0.5
    """Reward above which an answer has passed."""

    divides_by_spread: ClassVar[bool] = True

    @property
    def least_group(self) -> int:
        """Return k, or 2 where that is more."""
        return max(2, self.k)

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `pass_at_k` of the rewards."""
        return pass_at_k(groups.rewards, k=self.k, threshold=self.threshold)


def pass_at_k(rewards_PG: Tensor, *, k: int, threshold: float) -> Tensor:
    """Return the standard score of the reward "one of k passed", averaged over all choices of k that hold the answer.

    arXiv 2508.10751: of the C(G, k) choices, C(N, k) have no success, N the failures of the group. All
    choices that hold a success earn 1; those that hold a given failure earn it but for C(N - 1, k - 1) of C(G - 1, k - 1).
    0 where no choice, or every one, has a success. With k = 1 it is GRPO on passes, with the population's deviation.
    """
    group = group_size(rewards_PG, "pass_at_k")
    if k > group:
        rule = f"draws k answers of a group of {group}"
        raise ConfigError(explain("advantage.k", k, rule, "lower it, or raise samples_per_prompt"))
    passed_PG = rewards_PG > threshold
    table = torch.tensor([_scores(group, group - passed, k) for passed in range(group + 1)], dtype=rewards_PG.dtype).to(
        rewards_PG.device
    )
    of_passed_P1, of_failed_P1 = table[passed_PG.sum(dim=1)].split(1, dim=1)
    return torch.where(passed_PG, of_passed_P1, of_failed_P1)


def _scores(group: int, failures: int, k: int) -> tuple[float, float]:
    """Return the advantages of an answer that passed and of one that failed; (0, 0) where all choices earn the same."""
    mean = 1 - math.comb(failures, k) / math.comb(group, k)
    if mean in (0.0, 1.0):
        return 0.0, 0.0
    spread = math.sqrt(mean * (1 - mean))
    without = math.comb(failures - 1, k - 1) / math.comb(group - 1, k - 1)
    return (1 - mean) / spread, (1 - mean - without) / spread
