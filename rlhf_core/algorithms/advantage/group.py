"""Estimators that compare the completions of a prompt: a reward against a baseline of its group."""

# Shape legend: P prompts, G completions of a prompt (the group).

import math
from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards, group_centered, group_size
from rlhf_core.algorithms.token_math import Tensor
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.schema.base import CustomFunction, added_option


class GRPOAdvantage(GroupAdvantage):
    """Group relative policy optimization: the standard score of a reward in its group.

    Formula: (r - mean(r)) / (std(r) + eps), over the group; with std = "batch" the std is over all rewards of the step.
    Reference: arXiv 2402.03300, section 4.1.2; batch: arXiv 2508.08221.

    The standard deviation is the sample's (divisor G - 1), as in the published implementations.
    """

    type: Literal["grpo"] = "grpo"
    eps: float = Field(1e-6, gt=0)
    std: Literal["group", "batch"] = added_option("group")
    """Rewards of the standard deviation: `batch` is all rewards of the step (arXiv 2508.08221), so that a group
    of nearly equal rewards is not blown up; `dr_grpo` divides by nothing."""

    divides_by_spread: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        advantages_PG = group_centered(groups.rewards)
        if self.std == "batch":
            return advantages_PG / (groups.rewards.std() + self.eps)
        return advantages_PG / (advantages_PG.std(dim=1, keepdim=True) + self.eps)


class DrGRPOAdvantage(GroupAdvantage):
    """Dr. GRPO: the distance to the group's mean, not divided by anything.

    Formula: r - mean(r of the group).
    Reference: arXiv 2503.20783, section 3.2.

    Its other half is the constant divisor of the loss, `[ppo.loss] aggregation = "constant"`.
    """

    type: Literal["dr_grpo"] = "dr_grpo"

    def compare(self, groups: GroupRewards) -> Tensor:
        return group_centered(groups.rewards)


class ReinforcePPBaselineAdvantage(GroupAdvantage):
    """REINFORCE++-baseline: the group's mean is subtracted, and the result whitened over the step.

    Formula: r - mean(r of the group), whitened.
    Reference: arXiv 2501.03262.
    """

    type: Literal["reinforce++-baseline"] = "reinforce++-baseline"

    whitened: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        return group_centered(groups.rewards)


class FlashReinforceAdvantage(GroupAdvantage):
    """FlashREINFORCE: the distance to the mean reward of the step, for one answer to each prompt or more.

    Formula: r - mean(r of the step).
    Reference: FlashREINFORCE, 2026, as in OpenRLHF 0.11.2.

    The method's other parts are `[ppo.correction] level = "sequence", mode = "mask", gate = "kl"`, and `[ppo.loss]
    aggregation = "seq_mean_token_mean"`, with one optimizer step for each step.
    """

    type: Literal["flash_reinforce"] = "flash_reinforce"

    @property
    def least_group(self) -> int:
        """One, since the baseline is of all prompts."""
        return 1

    def compare(self, groups: GroupRewards) -> Tensor:
        offset_PG = groups.rewards - groups.rewards[0, 0]  # as in `group_centered`: equal rewards give exactly 0
        return offset_PG - offset_PG.mean()


class RLOOAdvantage(GroupAdvantage):
    """REINFORCE leave-one-out.

    Formula: r_i - mean(the other rewards of the group) = G / (G - 1) * (r_i - mean(r)).
    Reference: arXiv 2402.14740.
    """

    type: Literal["rloo"] = "rloo"

    def compare(self, groups: GroupRewards) -> Tensor:
        group = group_size(groups.rewards, self.type)
        return group_centered(groups.rewards) * (group / (group - 1))


class OPOAdvantage(GroupAdvantage):
    """OPO: on-policy RL with the optimal baseline, the mean weighted by length.

    Formula: r - b, b = sum(l r) / sum(l) over the group, l the lengths.
    Reference: arXiv 2505.23585.

    The squared norm of a completion's gradient is taken to grow with its tokens. DataError for a group without tokens.
    """

    type: Literal["opo"] = "opo"

    def compare(self, groups: GroupRewards) -> Tensor:
        group_size(groups.rewards, self.type)
        tokens_P1 = groups.lengths.sum(dim=1, keepdim=True)
        if bool((tokens_P1 <= 0).any()):
            rule = "the baseline is a mean weighted by length"
            raise DataError("lengths", 0, rule, "drop prompts whose completions are all empty")
        offset_PG = groups.rewards - groups.rewards[:, :1]  # as in `group_centered`: equal rewards give exactly 0
        return offset_PG - (groups.lengths * offset_PG).sum(dim=1, keepdim=True) / tokens_P1


class MaxRLAdvantage(GroupAdvantage):
    """MaxRL: the distance to the group's mean, divided by the mean; hard prompts weigh as in maximum likelihood.

    Formula: (r - mean(r)) / mean(r) over the group, 0 where the mean is 0.
    Reference: arXiv 2602.02710.

    With rewards 0 and 1 and K successes in a group of G, the mean over the group of A grad log pi is the mean of
    grad log pi over the successes minus its mean over all: in expectation the gradient of sum over k = 1..G - 1 of
    -(1 - p)^k / k, the first G - 1 terms of log p. (The G-th is what groups without a success would add, if grad log pi
    were subtracted in them, too.) DataError for rewards below 0, whose mean is no success rate.
    """

    type: Literal["maxrl"] = "maxrl"

    divides_by_spread: ClassVar[bool] = True

    def compare(self, groups: GroupRewards) -> Tensor:
        if bool((groups.rewards < 0).any()):
            rule = "maxrl divides by the mean reward of a prompt, which must be a rate of success"
            least = float(groups.rewards.min())
            raise DataError("reward", least, rule, "give rewards >= 0 (best 0 and 1), or use grpo")
        mean_P1 = groups.rewards.mean(dim=1, keepdim=True)
        relative_PG = group_centered(groups.rewards) / mean_P1.masked_fill(mean_P1 == 0, 1.0)
        return relative_PG.masked_fill(mean_P1 == 0, 0.0)  # a group without a success has no gradient


class PassAtKAdvantage(GroupAdvantage):
    """Pass@k training: the advantage of an answer when k of the group are drawn and one success is enough.

    Formula: passed: (1 - R) / s; failed: (1 - R - C(N - 1, k - 1) / C(G - 1, k - 1)) / s; R = 1 - C(N, k) / C(G, k), s^2 = R (1 - R), N failures.
    Reference: arXiv 2508.10751.

    Of the C(G, k) choices, C(N, k) have no success. Every choice with a success earns 1. Of the C(G - 1, k - 1) choices
    with a given failure, all but C(N - 1, k - 1) earn it. 0 where no choice, or every one, has a success. With k = 1 it
    is GRPO on passes, with the population's deviation.
    """

    type: Literal["pass@k"] = "pass@k"
    k: int = Field(4, ge=1)
    """Number of answers of which one has to pass; at most `samples_per_prompt`."""
    threshold: float = 0.5
    """Reward above which an answer has passed."""

    divides_by_spread: ClassVar[bool] = True

    @property
    def least_group(self) -> int:
        """k, but at least 2."""
        return max(2, self.k)

    def compare(self, groups: GroupRewards) -> Tensor:
        group = group_size(groups.rewards, self.type)
        if self.k > group:
            rule = f"draws k answers of a group of {group}"
            raise ConfigError("advantage.k", self.k, rule, "lower it, or raise samples_per_prompt")
        passed_PG = groups.rewards > self.threshold
        table = groups.rewards.new_tensor([_scores(group, group - passed, self.k) for passed in range(group + 1)])
        of_passed_P1, of_failed_P1 = table[passed_PG.sum(dim=1)].split(1, dim=1)
        return of_passed_P1.where(passed_PG, of_failed_P1)


class CustomAdvantage(CustomFunction, GroupAdvantage):
    """A user's custom estimator.

    Formula: the values that the user's function returns for the completions of each prompt.
    Reference: docs/custom.md.
    """

    type: Literal["custom"] = "custom"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Call the function with copies of rewards and lengths [P, G] and the `arguments`.

        ConfigError unless it returns finite numbers of their shape.
        """
        assert groups.function is not None
        rewards_PG = groups.rewards
        advantages_PG = groups.function(rewards_PG.clone(), groups.lengths.clone(), **self.arguments)
        is_tensor = isinstance(advantages_PG, type(rewards_PG))
        if not is_tensor or advantages_PG.shape != rewards_PG.shape:
            found = tuple(advantages_PG.shape) if is_tensor else type(advantages_PG).__name__
            rule = f"must be a tensor of shape {tuple(rewards_PG.shape)}"
            raise ConfigError("advantage.function returned", found, rule, "return one number for each answer")
        if not bool(advantages_PG.isfinite().all()):
            rule = "contains numbers that are not finite"
            raise ConfigError("advantage.function returned", "a tensor", rule, "check for divisions by 0")
        return advantages_PG.to(rewards_PG.dtype)


def _scores(group: int, failures: int, k: int) -> tuple[float, float]:
    """The advantages of an answer that passed and of one that failed; (0, 0) if all choices earn the same."""
    mean = 1 - math.comb(failures, k) / math.comb(group, k)
    if mean in (0.0, 1.0):
        return 0.0, 0.0
    spread = math.sqrt(mean * (1 - mean))
    without = math.comb(failures - 1, k - 1) / math.comb(group - 1, k - 1)
    return (1 - mean) / spread, (1 - mean - without) / spread
