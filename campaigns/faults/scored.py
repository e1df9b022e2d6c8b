"""Score two groups of answers as a stage does; the first answer of each causes a fault."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from campaigns.faults.fault import Outcome
from campaigns.faults.leftovers import watched
from rlhf_core.config.rewards import FunctionReward, RemoteReward, RewardsConfig
from rlhf_core.errors import RewardError
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rewards.terms import open_elsewhere
from rlhf_core.rollouts.scored_step import valid_groups
from rlhf_core.types import Completion, Generation, Message, Prompt, Rollout, floats, ids

TERM = "mood"
GROUP = 2

Value = Callable[[str], float]
"""The correct reward of an answer."""


def generation(prompt_id: str, text: str, label: str = "") -> Generation:
    """An answer `text` to a prompt."""
    prompt = Prompt(prompt_id, (Message("user", "hi"),), label, "faults")
    return Generation(prompt, ids((1,)), Completion(ids((2,)), floats((-1.0,)), text, "stop", 0, 0))


def groups(*texts: str, label: str = "") -> list[Generation]:
    """Answers to prompts p0, p0, p1, p1 ..."""
    return [generation(f"p{at // GROUP}", text, label) for at, text in enumerate(texts)]


@contextmanager
def opened(spec: FunctionReward | RemoteReward, folder: Path) -> Iterator[Scorer]:
    """Yield a scorer of one term."""
    with ExitStack() as leases:
        reward = open_elsewhere(TERM, spec, folder, leases)
        yield Scorer(RewardsConfig(terms={TERM: spec}), {TERM: reward})


def one_error(
    spec: FunctionReward | RemoteReward,
    folder: Path,
    answers: Sequence[Generation],
    *,
    named: str,
    value: Value | None = None,
) -> Outcome:
    """Score `answers` with `on_failure = "fail"`; the error must contain `named`, the term and the prompt.

    With `value`, all answers but the first are scored afterwards and must have the correct reward.
    """
    again, took = True, None
    with watched() as watch:
        with opened(spec, folder) as scorer:
            began = time.monotonic()
            said = "it was scored"
            try:
                scorer(answers)
            except RewardError as error:
                said = str(error)
            noticed = time.monotonic() - began
            if value is not None:
                began = time.monotonic()
                again = right(scorer(answers[1:]), value)
                took = time.monotonic() - began
        left = watch.left()
    names = f"rewards.{TERM}" in said and ("p0" in said or "generations" in said) and named in said
    if not (names and again) or left:
        return Outcome("not handled", noticed, None, f"{said}; scored again: {again}; {len(left)} processes are left")
    return Outcome("one error", noticed, took, said)


def left_out(
    spec: FunctionReward | RemoteReward,
    folder: Path,
    answers: Sequence[Generation],
    value: Value,
    *,
    named: str,
    lost: int = 1,
    counted: bool = True,
) -> Outcome:
    """Score `answers` with `on_failure = "invalid"`: the first `lost` get no reward but a reason with `named`.

    If `counted`, they count as failures of the term. The others must have the correct reward, only whole groups of them
    are trained on, and the next batch without the fault must be scored normally.
    """
    with watched() as watch:
        with opened(spec, folder) as scorer:
            began = time.monotonic()
            rollouts = scorer(answers)
            noticed = time.monotonic() - began
            share = scorer.logs().get(f"reward_failed/{TERM}")
            began = time.monotonic()
            again = right(scorer(answers[lost:]), value)
            recovered = time.monotonic() - began
        left = watch.left()
    reason = rollouts[0].invalid
    invalid = all(math.isnan(one.reward) and named in one.invalid for one in rollouts[:lost])
    groups_left = list(valid_groups(rollouts, group_size=GROUP)) == rollouts[GROUP:]
    share_is_right = share == (lost / len(answers) if counted else 0.0)
    if invalid and right(rollouts[lost:], value) and groups_left and share_is_right and again and not left:
        return Outcome("left out", noticed, recovered, reason)
    rewards = [one.reward for one in rollouts]
    return Outcome("not handled", noticed, None, f"{reason!r}, {rewards}, {share}, {again}, {len(left)} left")


def recovered(
    spec: FunctionReward | RemoteReward, folder: Path, answers: Sequence[Generation], value: Value, said: str
) -> Outcome:
    """Score `answers`: all of them must have the correct reward."""
    with watched() as watch:
        with opened(spec, folder) as scorer:
            began = time.monotonic()
            rollouts = scorer(answers)
            took = time.monotonic() - began
        left = watch.left()
    if right(rollouts, value) and not left:
        return Outcome("recovered", None, took, said)
    return Outcome("not handled", None, took, f"{[one.reward for one in rollouts]}, {len(left)} processes are left")


def right(rollouts: Sequence[Rollout], value: Value) -> bool:
    """Whether all rollouts have their expected reward."""
    return all(not one.invalid and one.reward == value(one.completion.text) for one in rollouts)
