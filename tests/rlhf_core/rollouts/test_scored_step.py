"""Rollouts without a reward: their groups are left out, and a step of nothing else is an error."""

import math
from dataclasses import replace

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rollouts.scored_step import source_metrics, valid_groups
from rlhf_core.types import Completion, Message, Prompt, Rollout


def rollout(name: str, invalid: str = "") -> Rollout:
    prompt = Prompt(name, (Message("user", name),), "", "test")
    completion = Completion((1,), (0.0,), "", "stop", 0, 0)
    return Rollout(prompt, (1,), completion, math.nan if invalid else 1.0, {}, invalid)


def test_a_group_loses_all_its_members_with_one():
    rollouts = [rollout("a"), rollout("a"), rollout("b"), rollout("b", "crashed"), rollout("c"), rollout("c")]
    assert [one.prompt.id for one in valid_groups(rollouts, group_size=2)] == ["a", "a", "c", "c"]
    assert [one.prompt.id for one in valid_groups(rollouts, group_size=1)] == ["a", "a", "b", "c", "c"]


def test_a_step_without_a_valid_group_is_an_error_that_says_why():
    with pytest.raises(RewardError, match=r"rewards\[prompt b\] = 'crashed': every group"):
        valid_groups([rollout("a"), rollout("b", "crashed")], group_size=2)


def test_metrics_by_source_need_several_sources():
    rows = [replace(rollout(name), reward=reward) for name, reward in (("a", 1.0), ("a", 3.0), ("b", 5.0), ("b", 5.0))]
    assert source_metrics(rows, 2) == {}
    mixed = [replace(one, prompt=replace(one.prompt, source=one.prompt.id)) for one in rows]
    assert source_metrics(mixed, 2) == {
        "source/a/reward": 2.0, "source/a/length": 1.0, "source/a/zero_variance": 0.0,
        "source/b/reward": 5.0, "source/b/length": 1.0, "source/b/zero_variance": 1.0,
    }  # fmt: skip
