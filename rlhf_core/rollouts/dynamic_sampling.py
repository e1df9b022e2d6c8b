"""Dynamic sampling: prompts whose answers all earn the same are replaced (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from rlhf_core.config.policy import DynamicSampling
from rlhf_core.types import Rollout


def sampled_until_decided(
    draw: Callable[[int], Sequence[Rollout]], config: DynamicSampling, *, groups: int, group_size: int
) -> list[Rollout]:
    """Return `groups` whole groups of rollouts that carry a gradient, in the order in which they were drawn.

    `draw(round)` returns the scored rollouts of a round, those of a prompt together. After `max_rounds` the groups that
    were passed over fill what is missing, so that a step has its size whatever happens.
    """
    decided: list[Sequence[Rollout]] = []
    passed_over: list[Sequence[Rollout]] = []
    for number in range(config.max_rounds):
        rollouts = draw(number)
        for start in range(0, len(rollouts), group_size):
            group = rollouts[start : start + group_size]
            (decided if is_decided(group, config) else passed_over).append(group)
        if len(decided) >= groups:
            break
    passed_over.sort(key=lambda group: any(rollout.invalid for rollout in group))  # stable: whole groups come first
    return [rollout for group in (decided + passed_over)[:groups] for rollout in group]


def is_decided(group: Sequence[Rollout], config: DynamicSampling) -> bool:
    """Return whether the rewards of a group differ or, with bounds, whether their mean lies strictly between them.

    A group with an invalid rollout is not decided.
    """
    if any(rollout.invalid for rollout in group):
        return False
    rewards = [rollout.reward for rollout in group]
    if config.low is None and config.high is None:
        return min(rewards) != max(rewards)
    mean = fmean(rewards)
    return (config.low is None or mean > config.low) and (config.high is None or mean < config.high)
