"""The greedy baseline: each prompt once, at temperature 0, with the rewards of the step."""

from collections.abc import Sequence
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.scored_step import with_greedy_rewards
from rlhf_core.stage.failures import Counts
from rlhf_core.types import Completion, Generation, Message, Prompt, Rollout, SamplingRequest


class Greedy:
    """An engine that answers a prompt with its own tokens, and keeps what it was asked."""

    asked: Sequence[SamplingRequest] = ()
    temperature = -1.0
    fails: tuple[int, ...] = ()
    """Prompt whose answer fails."""

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        self.asked, self.temperature = requests, sampling.temperature
        return [
            Completion(one.prompt_ids, (-1.0,) * len(one.prompt_ids), "", "stop", 0, one.seed, failure=self.lost(one))
            for one in requests
        ]

    def lost(self, request: SamplingRequest) -> str:
        return "the server went away" if request.prompt_ids == self.fails else ""


def length(generations: Sequence[Generation]) -> RewardOutcome:
    return RewardOutcome(tuple(float(len(one.completion.token_ids)) for one in generations))


def rollout(name: str, prompt_ids: tuple[int, ...]) -> Rollout:
    prompt = Prompt(id=name, messages=(Message("user", name),), label="", source="test")
    return Rollout(prompt, prompt_ids, Completion((3,), (-1.0,), "", "stop", 0, 1), 9.0, {})


def scored(ask: Any) -> Scorer:
    return Scorer(RewardsConfig(terms={"length": FunctionReward(function="any:thing")}), {"length": ask})


def with_greedy(
    engine: Any, rollouts: Sequence[Rollout], scorer: Scorer, *, group_size: int = 1
) -> tuple[list[Rollout], tuple[float, ...], list[Counts]]:
    noted: list[Counts] = []
    kept, rewards = with_greedy_rewards(
        engine,
        rollouts,
        SamplingConfig(temperature=0.7),
        scorer,
        step=3,
        group_size=group_size,
        note_failed=lambda step, counts: noted.append(counts),
    )
    return list(kept), rewards, noted


def test_each_prompt_is_answered_once_and_each_rollout_gets_its_own():
    engine: Any = Greedy()
    rollouts = [rollout("a", (1, 2)), rollout("a", (1, 2)), rollout("b", (1, 2, 3)), rollout("b", (1, 2, 3))]
    kept, found, _ = with_greedy(engine, rollouts, scored(length), group_size=2)
    assert kept == rollouts and found == (2.0, 2.0, 3.0, 3.0)
    assert engine.temperature == 0.0 and [one.prompt_ids for one in engine.asked] == [(1, 2), (1, 2, 3)]


def test_prompts_of_the_same_words_share_an_answer_and_no_reward():
    def by_label(generations: Sequence[Generation]) -> RewardOutcome:
        return RewardOutcome(tuple(float(ord(one.prompt.id)) for one in generations))

    engine: Any = Greedy()
    _, found, _ = with_greedy(engine, [rollout("a", (1,)), rollout("b", (1,))], scored(by_label))
    assert found == (float(ord("a")), float(ord("b"))) and len(engine.asked) == 1


def test_a_prompt_without_a_greedy_reward_is_left_out_and_noted(caplog):
    engine: Any = Greedy()
    engine.fails = (1,)
    rollouts = [rollout("a", (1,)), rollout("a", (1,)), rollout("b", (2, 3)), rollout("b", (2, 3))]
    kept, found, noted = with_greedy(engine, rollouts, scored(length), group_size=2)
    assert kept == rollouts[2:] and found == (2.0, 2.0)
    assert noted == [{"agent": (1, 2), "rewards.terms.length": (0, 1)}]
    assert "prompt a has no greedy answer with a reward (the server went away)" in caplog.text


def test_failures_of_rollouts_and_of_greedy_answers_are_noted_together():
    scorer = scored(length)
    lost = Completion((), (), "", "stop", 0, 1, failure="lost")
    scorer.at_step(3)
    scorer([Generation(rollout("a", (1,)).prompt, (1,), lost)])
    _, _, noted = with_greedy(Greedy(), [rollout("a", (1,))], scorer)
    assert noted[0]["agent"] == (1, 2)


def test_where_no_prompt_has_a_baseline_the_step_fails():
    engine: Any = Greedy()
    engine.fails = (1,)
    with pytest.raises(
        RewardError, match=r"prompt a\] = 'no baseline, greedy answer: the server went away': every group"
    ):
        with_greedy(engine, [rollout("a", (1,))], scored(length))
