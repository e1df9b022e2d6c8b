"""The greedy baseline: each prompt once, at temperature 0, with the rewards of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.greedy import greedy_rewards
from rlhf_core.types import Completion, Generation, Message, Prompt, Rollout, SamplingRequest


class Greedy:
    """An engine that answers a prompt with its own tokens, and keeps what it was asked."""

    asked: Sequence[SamplingRequest] = ()
    temperature = -1.0
    failure = ""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        self.asked, self.temperature = requests, sampling.temperature
        return [
            Completion(one.prompt_ids, (-1.0,) * len(one.prompt_ids), "", "stop", 0, one.seed, failure=self.failure)
            for one in requests
        ]


def length(generations: Sequence[Generation]) -> list[float]:
    return [float(len(one.completion.token_ids)) for one in generations]


def rollout(name: str, prompt_ids: tuple[int, ...]) -> Rollout:
    prompt = Prompt(id=name, messages=(Message("user", name),), label="", source="test")
    return Rollout(prompt, prompt_ids, Completion((3,), (-1.0,), "", "stop", 0, 1), 9.0, {})


def scored(ask: Any) -> Scorer:
    return Scorer(RewardsConfig(terms={"length": FunctionReward(function="any:thing")}), {"length": ask})


def test_each_prompt_is_answered_once_and_each_rollout_gets_its_own() -> None:
    engine: Any = Greedy()
    rollouts = [rollout("a", (1, 2)), rollout("a", (1, 2)), rollout("b", (1, 2, 3))]
    found = greedy_rewards(engine, rollouts, SamplingConfig(temperature=0.7), scored(length), step=3)
    assert found == (2.0, 2.0, 3.0)
    assert engine.temperature == 0.0 and [one.prompt_ids for one in engine.asked] == [(1, 2), (1, 2, 3)]


def test_an_answer_without_a_reward_is_no_baseline() -> None:
    engine: Any = Greedy()
    engine.failure = "the server went away"
    with pytest.raises(RewardError, match=r"prompt a, greedy answer\] = 'the server went away': remax has no baseline"):
        greedy_rewards(engine, [rollout("a", (1,))], SamplingConfig(), scored(length), step=0)
