"""Held-out prompts: which ones they are, and what the answers to them are scored with."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.monitors import HeldOutConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.batches import RewardOutcome
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.answers import SINGLE_TURN
from rlhf_core.rollouts.held_out import HeldOut
from rlhf_core.rollouts.prompts import hold_out
from rlhf_core.stage.failures import Counts
from rlhf_core.types import Completion, Generation, Message, Prompt, SamplingRequest

PROMPTS = [Prompt(f"p{number}", (Message("user", f"{number}?"),), "", "test") for number in range(20)]
TERM = FunctionReward(function="tests.support.token_rewards:small_is_good")


def contents(prompts: Sequence[Prompt]) -> set[str]:
    return {prompt.messages[-1].content for prompt in prompts}


def test_the_same_prompts_are_held_out_whatever_their_order_and_ids():
    config = HeldOutConfig(prompts=5)
    training, held_out = hold_out(PROMPTS, config)
    assert len(held_out) == 5
    assert contents(training) | contents(held_out) == contents(PROMPTS)
    renamed = [Prompt(f"x{number}", one.messages, "", "test") for number, one in enumerate(reversed(PROMPTS))]
    assert contents(hold_out(renamed, config)[1]) == contents(held_out)


def test_no_training_prompt_has_a_held_out_conversation():
    twice = [*PROMPTS, *(Prompt(f"again-{one.id}", one.messages, "", "test") for one in PROMPTS)]
    training, held_out = hold_out(twice, HeldOutConfig(prompts=5))
    assert len(held_out) == 5
    assert not contents(training) & contents(held_out)
    assert len(training) == 30


def test_without_a_section_all_prompts_are_trained_on_in_their_order():
    assert hold_out(PROMPTS, None) == (PROMPTS, [])


def test_some_prompts_must_be_left_to_train_on():
    with pytest.raises(ConfigError, match=r"ppo\.evaluate\.prompts = 20: there are 20 different prompts"):
        hold_out(PROMPTS, HeldOutConfig(prompts=20))


class Engine:
    """Answers with the seed of the request, so that one can tell the requests apart."""

    def __init__(self) -> None:
        self.seeds: list[list[int]] = []

    def generate(self, requests: Sequence[SamplingRequest], sampling: SamplingConfig) -> list[Completion]:
        self.seeds.append([one.seed for one in requests])
        return [Completion((5,) * 3, (-0.5,) * 3, str(one.seed), "stop", 0, one.seed) for one in requests]


class Chat:
    """Renders nothing."""

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return (1,)


def held_out(
    engine: Any, scorer: Scorer, independent: Scorer | None, noted: list[tuple[int, Counts]], *, samples: int = 2
) -> HeldOut:
    chat: Any = Chat()
    return HeldOut(
        config=HeldOutConfig(prompts=3, samples=samples),
        prompts=PROMPTS[:3],
        engine=engine,
        chat=chat,
        sampling=SamplingConfig(),
        seed=17,
        environments=SINGLE_TURN,
        scorers={"reward": scorer} | ({"independent": independent} if independent else {}),
        note_failed=lambda step, counts: noted.append((step, counts)),
    )


def by_prompt(generations: Sequence[Generation]) -> RewardOutcome:
    """Return 0 and 2 for the answers to the first prompt, 10 and 12 for those to the second, 20 and 22 for the third."""
    values = (10 * int(one.prompt.id[1:]) + 2.0 * (place % 2) for place, one in enumerate(generations))
    return RewardOutcome(tuple(values))


def test_every_evaluation_draws_with_the_same_seeds_and_scores_by_prompt():
    engine = Engine()
    terms = RewardsConfig(terms={"own": TERM})
    evaluated = held_out(engine, Scorer(terms, {"own": by_prompt}), None, [])
    measured = [evaluated.score(step, evaluated.sample()) for step in (0, 10)]
    assert engine.seeds[0] == engine.seeds[1]
    assert len(set(engine.seeds[0])) == 6
    assert measured[0] == measured[1]
    assert measured[0].samples == {"eval/reward/mean": (1.0, 11.0, 21.0)}
    metrics: Metrics = measured[0].metrics
    assert metrics["eval/reward/mean"] == 11.0
    assert metrics["eval/reward/stderr"] == pytest.approx(10 / math.sqrt(3))
    assert metrics["eval/reward_component/own"] == 11.0


def test_the_rewards_that_train_are_not_normalized_and_their_statistics_are_left_alone():
    config = RewardsConfig(terms={"own": TERM.model_copy(update={"normalize": "running"})}, normalize="running")
    trained = Scorer(config, {"own": by_prompt})
    before = str(trained.state())
    evaluated = held_out(Engine(), trained.comparable(), None, [])
    assert evaluated.score(1, evaluated.sample()).metrics["eval/reward/mean"] == 11.0
    assert str(trained.state()) == before


def test_an_answer_that_the_independent_reward_failed_for_is_left_out_and_noted():
    failing = RewardsConfig(terms={"gold": TERM.model_copy(update={"on_failure": "invalid"})})

    def fails_for_the_first(generations: Sequence[Generation]) -> RewardOutcome:
        values = by_prompt(generations).values
        return RewardOutcome((None, None, *values[2:]), failures={0: "no", 1: "no"})

    noted: list[tuple[int, Counts]] = []
    scorer = Scorer(RewardsConfig(terms={"own": TERM}), {"own": by_prompt})
    evaluated = held_out(Engine(), scorer, Scorer(failing, {"gold": fails_for_the_first}), noted)
    measured = evaluated.score(4, evaluated.sample())
    assert measured.metrics["eval/independent/mean"] == 16.0
    assert [math.isnan(value) for value in measured.samples["eval/independent/mean"]] == [True, False, False]
    assert noted == [(-5, {"agent": (0, 6), "rewards.terms.own": (0, 6), "evaluate.independent.terms.gold": (2, 6)})]


def test_terms_of_one_name_are_kept_apart():
    terms = RewardsConfig(terms={"own": TERM})
    independent = Scorer(terms, {"own": lambda generations: RewardOutcome((1.0,) * len(generations))})
    evaluated = held_out(Engine(), Scorer(terms, {"own": by_prompt}), independent, [])
    metrics = evaluated.score(0, evaluated.sample()).metrics
    assert (metrics["eval/reward_component/own"], metrics["eval/independent_component/own"]) == (11.0, 1.0)


def test_an_episode_that_failed_is_noted_once():
    terms = RewardsConfig(terms={"own": TERM})
    noted: list[tuple[int, Counts]] = []
    evaluated = held_out(Engine(), Scorer(terms, {"own": by_prompt}), Scorer(terms, {"own": by_prompt}), noted)
    first, *others = evaluated.sample()
    evaluated.score(0, [replace(first, completion=replace(first.completion, failure="the program died")), *others])
    expected = {"agent": (1, 6), "rewards.terms.own": (0, 5), "evaluate.independent.terms.own": (0, 5)}
    assert noted == [(-1, expected)]
