"""Rollouts without a reward: their groups are left out, and a step of nothing else is an error."""

from __future__ import annotations

import math

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rollouts.scored_step import valid_groups
from rlhf_core.types import Completion, Message, Prompt, Rollout


def rollout(name: str, invalid: str = "") -> Rollout:
    prompt = Prompt(name, (Message("user", name),), "", "test")
    completion = Completion((1,), (0.0,), "", "stop", 0, 0)
    return Rollout(prompt, (1,), completion, math.nan if invalid else 1.0, {}, invalid)


def test_a_group_loses_all_its_members_with_one() -> None:
    rollouts = [rollout("a"), rollout("a"), rollout("b"), rollout("b", "crashed"), rollout("c"), rollout("c")]
    assert [one.prompt.id for one in valid_groups(rollouts, group_size=2)] == ["a", "a", "c", "c"]
    assert [one.prompt.id for one in valid_groups(rollouts, group_size=1)] == ["a", "a", "b", "c", "c"]


def test_a_step_without_a_valid_group_is_an_error_that_says_why() -> None:
    with pytest.raises(RewardError, match=r"rewards\[prompt b\] = 'crashed': every group"):
        valid_groups([rollout("a"), rollout("b", "crashed")], group_size=2)
