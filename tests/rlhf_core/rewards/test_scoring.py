"""Generations to rollouts: terms, composition and shaping in their order."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rlhf_core.config.rewards import (
    EnsembleReward,
    FunctionReward,
    OverlongPenalty,
    ProcessRewardModelReward,
    RewardModelReward,
    RewardsConfig,
)
from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.scoring import Scorer, check_reward_models
from rlhf_core.types import Completion, Generation, Message, ProcessRewardModelRef, Prompt, RewardModelRef

TERMS = {
    "length": FunctionReward(function="m:length", weight=1.0),
    "constant": FunctionReward(function="m:constant", weight=2.0),
}


def length(generations: Sequence[Generation]) -> list[float]:
    return [float(len(one.completion.token_ids)) for one in generations]


def constant(generations: Sequence[Generation]) -> list[float]:
    return [0.5 for _ in generations]


def answers(*lengths: int) -> list[Generation]:
    prompt = Prompt("p", (Message("user", "hi"),), "", "test")
    return [
        Generation(prompt, (1,), Completion((3,) * size, (-1.0,) * size, "text", "stop", 0, seed))
        for seed, size in enumerate(lengths)
    ]


def scorer(config: RewardsConfig) -> Scorer:
    return Scorer(config, {"length": length, "constant": constant})


def test_a_rollout_keeps_its_completion_and_its_unweighted_components() -> None:
    generations = answers(2, 4)
    rollouts = scorer(RewardsConfig(terms=TERMS))(generations)
    assert [rollout.reward for rollout in rollouts] == [3.0, 5.0]  # length + 2 * 0.5
    assert rollouts[1].reward_components == {"length": 4.0, "constant": 0.5}
    assert [rollout.completion for rollout in rollouts] == [one.completion for one in generations]


def test_the_clip_comes_before_the_overlong_penalty() -> None:
    overlong = OverlongPenalty(max_tokens=10, buffer_tokens=4, factor=1.0)
    rollouts = scorer(RewardsConfig(terms=TERMS, clip=4.0, overlong=overlong))(answers(2, 8))
    # length 8: clip(9, 4) = 4, penalty -(8 - 6)/4 = -0.5
    assert [rollout.reward for rollout in rollouts] == [3.0, 3.5]
    assert [rollout.reward_components["overlong"] for rollout in rollouts] == [0.0, -0.5]


def test_running_normalisation_goes_on_from_a_checkpoint() -> None:
    config = RewardsConfig(terms=TERMS, normalise="running")
    whole = scorer(config)
    whole(answers(1, 3))
    expected = [rollout.reward for rollout in whole(answers(5))]
    first = scorer(config)
    assert [rollout.reward for rollout in first(answers(1, 3))] == pytest.approx([-1.0, 1.0], rel=1e-6)
    resumed = scorer(config)
    resumed.restore(json.loads(json.dumps(first.state())))
    # 1, 3, 5 (+1 each): mean 3, variance 8/3
    assert expected == pytest.approx([2 / (8 / 3) ** 0.5], rel=1e-6)
    assert [rollout.reward for rollout in resumed(answers(5))] == expected


def test_a_reward_that_is_not_a_number_names_its_term() -> None:
    broken = Scorer(RewardsConfig(terms=TERMS), {"length": length, "constant": lambda rows: [float("nan")] * len(rows)})
    with pytest.raises(RewardError, match=r"rewards\.constant\[prompt p\]"):
        broken(answers(1))


def test_a_term_whose_reward_model_was_not_given_is_refused_with_the_nearest() -> None:
    config = RewardsConfig(terms={"quality": RewardModelReward(model="reward_modle")})
    given = {"reward_model": RewardModelRef(uri="store://a", digest="a")}
    with pytest.raises(
        ConfigError, match=r"rewards\.terms\.quality\.model = 'reward_modle'.*did you mean reward_model"
    ):
        check_reward_models(config, given)
    with pytest.raises(ConfigError, match="the stage has none"):
        check_reward_models(config, {})


def test_every_model_of_every_kind_of_term_must_be_there_and_of_its_kind() -> None:
    judge, model = ProcessRewardModelRef(uri="store://j", digest="j"), RewardModelRef(uri="store://a", digest="a")
    given = {"reward_model": model, "process_reward_model": judge}
    good = {"steps": ProcessRewardModelReward(), "both": EnsembleReward(models=("reward_model", "reward_model"))}
    check_reward_models(RewardsConfig(terms=good), given)
    missing = EnsembleReward(models=("reward_model", "other"))
    with pytest.raises(ConfigError, match=r"rewards\.terms\.e\.models\[1\] = 'other'"):
        check_reward_models(RewardsConfig(terms={"e": missing}), given)
    whole = RewardModelReward(model="process_reward_model")
    with pytest.raises(ConfigError, match=r"terms\.w\.model .* judges steps .*type = \"process_reward_model\""):
        check_reward_models(RewardsConfig(terms={"w": whole}), given)
