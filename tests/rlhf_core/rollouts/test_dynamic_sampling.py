"""Groups that carry no gradient are replaced, up to a number of rounds, and a step always has its size."""

import math
from dataclasses import replace

import pytest

from rlhf_core.config.policy import DynamicSampling
from rlhf_core.errors import RewardError
from rlhf_core.rollouts.scored_step import is_decided, sampled_until_decided
from rlhf_core.types import Completion, Message, Prompt, Rollout


def group(name: str, *rewards: float) -> list[Rollout]:
    prompt = Prompt(name, (Message("user", name),), "", "test")
    completion = Completion((1,), (0.0,), "", "stop", 0, 0)
    return [Rollout(prompt, (1,), completion, reward, {}) for reward in rewards]


ROUNDS = [group("a", 1, 1) + group("b", 0, 1), group("c", 0, 0) + group("d", 1, 0), group("e", 2, 1) + group("f", 0, 2)]


@pytest.mark.parametrize(
    ("groups", "rounds", "names", "drawn"),
    [
        (1, 3, ["b"], [0]),
        (2, 3, ["b", "d"], [0, 1]),
        (3, 3, ["b", "d", "e"], [0, 1, 2]),
        (3, 2, ["b", "d", "a"], [0, 1]),  # the cap: a fills, for nothing better came
    ],
)
def test_rounds_are_drawn_until_there_are_enough_groups(groups, rounds, names, drawn):
    asked: list[int] = []

    def draw(number: int) -> list[Rollout]:
        asked.append(number)
        return ROUNDS[number]

    made = sampled_until_decided(draw, DynamicSampling(max_rounds=rounds), groups=groups, group_size=2)
    assert [rollout.prompt.id for rollout in made] == [name for name in names for _ in range(2)]
    assert asked == drawn


def test_a_group_with_an_invalid_rollout_is_drawn_anew_and_fills_last():
    broken = [replace(rollout, invalid="crashed", reward=math.nan) for rollout in group("a", 0, 1)]
    rounds = [broken + group("b", 1, 1), group("c", 0, 1)]
    made = sampled_until_decided(rounds.__getitem__, DynamicSampling(max_rounds=2), groups=3, group_size=2)
    assert [rollout.prompt.id for rollout in made] == ["c", "c", "b", "b", "a", "a"]


@pytest.mark.parametrize(
    ("rewards", "bounds", "decided"),
    [
        ((0, 0), {}, False),
        ((0, 1), {}, True),
        ((0, 1), {"low": 0.5}, False),  # strictly above
        ((0, 2), {"low": 0.5, "high": 1.5}, True),
        ((1, 1), {"high": 1.5}, True),
        ((2, 1), {"high": 1.5}, False),
    ],
)
def test_a_group_is_decided_by_its_spread_or_by_its_mean(rewards, bounds, decided):
    assert is_decided(group("x", *rewards), DynamicSampling(**bounds)) is decided


@pytest.mark.parametrize(
    ("rewards", "scores", "bounds", "decided"),
    [
        ((1, -1), (1, 0), {"low": 0, "high": 1}, True),  # the mean of the rewards, 0, is not above 0
        ((1, 1), (1, 1), {"low": 0, "high": 1}, False),
        ((0.5, 0.75), (1, 1), {}, False),
        ((1, -1), (None, None), {"low": 0, "high": 1}, False),
    ],
)
def test_a_group_is_judged_by_its_scores_where_it_has_some(rewards, scores, bounds, decided):
    made = [replace(one, score=score) for one, score in zip(group("x", *rewards), scores, strict=True)]
    assert is_decided(made, DynamicSampling(**bounds)) is decided


def test_a_group_of_which_some_have_a_score_is_an_error_unless_it_is_invalid_anyway():
    first, second = group("x", 1, -1)
    with pytest.raises(RewardError, match=r"rewards\.scores\[prompt x\] = \[1\.0\]: .* 1 of the 2 answers .* have one"):
        is_decided([replace(first, score=1.0), second], DynamicSampling())
    assert not is_decided([replace(first, score=1.0), replace(second, invalid="crashed")], DynamicSampling())
