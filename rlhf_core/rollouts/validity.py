"""Rollouts without a reward are left out, with their whole group: never scored 0, never silently."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.errors import RewardError, explain
from rlhf_core.types import Generation, Rollout


def valid_groups(rollouts: Sequence[Rollout], *, group_size: int) -> list[Rollout]:
    """Return the groups of `group_size` consecutive rollouts in which every one is valid.

    A group that lost a member would be compared with another baseline. RewardError if no group is left.
    """
    groups = [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]
    kept = [rollout for group in groups if not any(one.invalid for one in group) for rollout in group]
    if rollouts and not kept:
        first = next(rollout for rollout in rollouts if rollout.invalid)
        where = f"rewards[prompt {first.prompt.id}]"
        raise RewardError(explain(where, first.invalid, "every group of the step has an invalid rollout", "mend it"))
    return kept


def has_whole_group(generations: Sequence[Generation], *, group_size: int) -> bool:
    """Return whether in one of the groups of `group_size` consecutive answers no episode failed."""
    groups = [generations[start : start + group_size] for start in range(0, len(generations), group_size)]
    return any(not any(one.completion.failure for one in group) for group in groups)
