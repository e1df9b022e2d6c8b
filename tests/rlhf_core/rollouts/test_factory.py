"""Where rollouts come from: which weights answer for which step, overlap, and going on from a checkpoint."""

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import DynamicSampling, PartialRollouts, PPOConfig, Staleness
from rlhf_core.data.shards import RolloutLog
from rlhf_core.errors import DataError, RewardError, SamplerLostError
from rlhf_core.interfaces import Metrics
from rlhf_core.rollouts.scored_step import open_rollouts, rollout_metrics, staleness
from rlhf_core.stage.failures import Counts
from rlhf_core.types import ActionSpan, Completion, Generation, Rollout, SamplingRequest
from tests.rlhf_core.rollouts.fake_engines import PROMPTS, FakeChat, FakeSampler, FakeScorer, FakeTrainer


class Ahead:
    """The rollouts of steps over fake engines, with what they were asked for."""

    def __init__(
        self,
        folder: Path,
        length: Callable[[SamplingRequest], int] = lambda request: 1,
        *,
        sampler: FakeSampler | None = None,
        score: FakeScorer | None = None,
        **changes: Any,
    ):
        settings = {
            "steps": 6,
            "prompts_per_step": 2,
            "samples_per_prompt": 2,
            "sampling": SamplingConfig(max_tokens=4),
        }
        self.config = PPOConfig(**(settings | changes))
        self.sampler = sampler or FakeSampler(length)
        self.policy = FakeTrainer()
        self.score = score or FakeScorer()
        self._log = RolloutLog(folder / "log")
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        rollouts = open_rollouts(self.config, self.sampler, self.score, FakeChat(), PROMPTS, self._log, seed=3)
        self.steps, self._scored = self._opened.enter_context(rollouts)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

    def step(self, step: int) -> tuple[list[Rollout], Metrics]:
        self.policy.version = step
        self.steps.load_weights(self.policy.weights, version=step)
        drawn = self.steps.generate(step)
        rollouts = self._scored(step, drawn)
        self._log.wait()
        return rollouts, rollout_metrics(step, drawn, rollouts, self.config, ahead=self.steps.ahead, ends=())


@pytest.mark.parametrize("behind", [0, 1, 2, 4])
def test_a_step_trains_on_what_the_weights_of_that_many_steps_before_sampled(tmp_path, behind):
    ahead = Ahead(tmp_path, ahead=Staleness(steps=behind))
    with ahead:
        made = [ahead.step(step) for step in range(6)]
    versions = [{one.completion.policy_version for one in rollouts} for rollouts, _ in made]
    assert versions == [{max(0, step - behind)} for step in range(6)]
    assert [metrics["rollout/staleness_max"] for _, metrics in made] == [min(step, behind) for step in range(6)]
    assert [metrics["rollout/in_flight"] for _, metrics in made] == [2 * min(behind, 5 - step) for step in range(6)], (
        "groups of the steps ahead; none beyond the last"
    )
    assert len(ahead.sampler.batches) == 6
    assert ahead.sampler.version == 5 - behind, "weights that nobody samples with are not sent"


@pytest.mark.parametrize(
    ("ahead", "expects"),
    [(None, True), (PartialRollouts(tokens=2), True), (Staleness(steps=2), True), (DynamicSampling(), False)],
)
def test_the_engine_need_not_keep_its_weights_after_the_last_answers_of_a_step(tmp_path, ahead, expects):
    """Dynamic sampling may ask for more once the answers have their rewards."""
    rollouts = Ahead(tmp_path, ahead=ahead)
    with rollouts:
        for version in (0, 1):
            rollouts.policy.version = version
            rollouts.steps.load_weights(rollouts.policy.weights, version=version)
            rollouts.steps.generate(version)
            rollouts.steps.save(tmp_path / str(version))  # which waits for the steps ahead
            assert rollouts.sampler.expects_weights == expects
            rollouts.steps.borrow(rollouts.policy.weights, version=version, job=rollouts.sampler.batches.clear)
            assert rollouts.sampler.expects_weights


def test_the_same_prompts_are_asked_with_the_same_seeds_whoever_answers(tmp_path):
    asked = []
    for behind in (0, 2):
        ahead = Ahead(tmp_path / str(behind), ahead=Staleness(steps=behind))
        with ahead:
            asked.append([[one.completion.seed for one in ahead.step(step)[0]] for step in range(6)])
    assert asked[0] == asked[1]


def test_rewards_are_weighed_as_at_the_step_that_trains_on_them(tmp_path):
    ahead = Ahead(tmp_path, ahead=Staleness(steps=2))
    with ahead:
        for step in range(6):
            ahead.step(step)
            assert ahead.score.step == step


def test_the_next_step_is_sampled_while_this_one_trains(tmp_path):
    ahead = Ahead(tmp_path, ahead=Staleness(steps=1))
    trained = threading.Event()
    seen: list[bool] = []

    def when_trained(request: SamplingRequest) -> int:
        if ahead.sampler.version == 1:  # the batch of step 2, asked for when step 1 begins to train
            seen.append(trained.wait(20))
        return 1

    ahead.sampler._length = when_trained
    with ahead:
        ahead.step(0)
        ahead.step(1)  # returns although the batch of step 2 cannot end before the training of step 1
        trained.set()
        ahead.step(2)
    assert seen
    assert all(seen)


def test_what_goes_wrong_ahead_is_raised_by_the_next_step_and_by_a_checkpoint(tmp_path):
    ahead = Ahead(tmp_path, ahead=Staleness(steps=1))

    def fail(request: SamplingRequest) -> int:
        raise SamplerLostError("sampler.policy = 'generate on worker 0': the worker died; run again")

    with ahead:
        ahead.step(0)
        ahead.steps.save(tmp_path / "whole")  # waits, so that nothing is under way
        ahead.sampler._length = fail
        ahead.step(1)
        with pytest.raises(SamplerLostError, match="the worker died"):
            ahead.steps.save(tmp_path / "checkpoint")
        with pytest.raises(SamplerLostError, match="the worker died"):
            ahead.step(2)


def every_third_is_long(request: SamplingRequest) -> int:
    return 4 if request.prompt_ids[1] % 3 == 0 else 1


@pytest.mark.parametrize(
    "ahead", [Staleness(steps=1), Staleness(steps=3), PartialRollouts(tokens=2), PartialRollouts(staleness=2, tokens=1)]
)
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_source_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path, ahead, at):
    whole = Ahead(tmp_path / "whole", every_third_is_long, ahead=ahead)
    with whole:
        expected = [whole.step(step) for step in range(6)]
    killed = Ahead(tmp_path / "killed", every_third_is_long, ahead=ahead)
    with killed:
        made = [killed.step(step) for step in range(at)]
        killed.steps.save(tmp_path / "checkpoint")
    # without the log: the checkpoint is enough
    resumed = Ahead(tmp_path / "resumed", every_third_is_long, ahead=ahead)
    with resumed:
        resumed.steps.load(tmp_path / "checkpoint", at)
        made += [resumed.step(step) for step in range(at, 6)]
    assert made == expected


@pytest.mark.parametrize(
    "ahead", [None, Staleness(steps=2), PartialRollouts(tokens=2), PartialRollouts(staleness=1, tokens=2)]
)
def test_steps_that_were_scored_after_the_checkpoint_are_taken_from_the_log(tmp_path, ahead):
    killed = Ahead(tmp_path, every_third_is_long, ahead=ahead)
    with killed:
        killed.step(0)
        killed.steps.save(tmp_path / "checkpoint")
        expected = [killed.step(step) for step in range(1, 6)]
    resumed = Ahead(tmp_path, every_third_is_long, ahead=ahead)
    with resumed:
        resumed.steps.load(tmp_path / "checkpoint", 1)
        assert [resumed.step(step) for step in range(1, 6)] == expected
    assert resumed.sampler.batches == []
    assert resumed.score.scored == killed.score.scored  # restored, not scored again


def test_a_checkpoint_without_the_rollouts_that_it_counts_on_is_refused(tmp_path):
    ahead = Ahead(tmp_path, ahead=Staleness(steps=2))
    rule = r"rollouts of the steps 3 to 4 should be here, but found those of \[\]; start the stage over with --force"
    with ahead, pytest.raises(DataError, match=rule):
        ahead.steps.load(tmp_path / "nothing", 3)


def test_staleness_is_weighed_by_tokens_over_the_segments():
    parts = Completion((1,) * 4, (0.0,) * 4, "", "stop", 5, 0, (ActionSpan(0, 3, 3), ActionSpan(3, 4, 5)))
    whole = Completion((1,) * 4, (0.0,) * 4, "", "stop", 5, 0)
    rollouts = [Rollout(PROMPTS[0], (9, 0), made, 0.0, {}) for made in (parts, whole)]
    assert staleness(rollouts, 5) == {"rollout/staleness": 6 / 8, "rollout/staleness_max": 2.0}


@pytest.mark.parametrize("ahead", [None, "staleness", "dynamic"])
def test_a_step_without_a_valid_group_is_scored_again_by_the_next_attempt(tmp_path, ahead):
    class Down(FakeScorer):
        def __call__(self, generations: Sequence[Generation]) -> list[Rollout]:
            return [replace(one, reward=math.nan, invalid="refused") for one in super().__call__(generations)]

    down = Ahead(tmp_path, score=Down(), ahead=ahead)
    with down, pytest.raises(RewardError, match="every group of the step has an invalid rollout"):
        down.step(0)
    again = Ahead(tmp_path, ahead=ahead)
    with again:
        assert len(again.step(0)[0]) == 4


def test_episodes_that_all_failed_are_not_kept_in_a_checkpoint_for_ever(tmp_path):
    class Away(FakeSampler):
        def _answer(self, request: SamplingRequest, most: int) -> Completion:
            failure = "the server is away" if len(self.batches) == 2 else ""
            return replace(super()._answer(request, most), failure=failure)

    first = Ahead(tmp_path, sampler=Away(), ahead=Staleness(steps=2))
    with first:
        first.step(0)
        first.steps.save(tmp_path / "checkpoint")
    assert {bool(one.completion.failure) for one in first.steps._drawn[1].result().generations} == {True}
    again = Ahead(tmp_path, ahead=Staleness(steps=2))
    with again:
        again.steps.load(tmp_path / "checkpoint", 1)
        made = [again.step(step)[0] for step in range(1, 6)]
    versions = [{one.completion.policy_version for one in rollouts} for rollouts in made]
    assert versions == [{1}, {1}, {1}, {2}, {3}], "step 2 too: its weights come after those of step 1"


def test_what_failed_is_noted_before_the_answers_are_kept(tmp_path):
    """A kill between the two would keep answers that failed under settings that nobody noted."""
    log, noted = RolloutLog(tmp_path / "log"), []

    def note(step: int, counts: Counts) -> None:
        assert not (tmp_path / "log").exists() or not list((tmp_path / "log").iterdir()), "kept already"
        noted.append((step, counts))

    class Failing(FakeScorer):
        def failed(self) -> Counts:
            return {"rewards.terms.mine": (1, 4)}

    config = PPOConfig(prompts_per_step=2, samples_per_prompt=2, sampling=SamplingConfig(max_tokens=4), steps=2)
    with open_rollouts(
        config, FakeSampler(lambda request: 1), Failing(), FakeChat(), PROMPTS, log, seed=3, note_failed=note
    ) as (sampler, score):
        sampler.load_weights(FakeTrainer().weights, version=0)
        score(0, sampler.generate(0))
    assert noted == [(1, {"rewards.terms.mine": (1, 4)})]
