"""Define the outcome of a reward for a batch of generations: values, failures, scores and logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlhf_core.config.rewards import OnFailure
from rlhf_core.errors import RewardError, explain
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import Generation, encodable

LARGEST_REWARD = 1e6
"""A larger reward counts as a bug: it would dominate every other sample of its batch."""
LONGEST_REASON = 200

Logs = Mapping[str, tuple[float, int]]
"""Name -> sum and count of what is to be logged as a mean."""


@dataclass(frozen=True, slots=True)
class RewardOutcome:
    """One value per generation; None where the reward does not apply or failed. `failures`: position -> why it failed.

    `scores` are what it says of each generation for dynamic sampling to go by, None for those it says nothing of; empty
    where it says nothing of any.

    >>> RewardOutcome((1.0, None, None), failures={2: "took longer than 5 s"}).failures[2]
    'took longer than 5 s'
    """

    values: tuple[float | None, ...]
    failures: Mapping[int, str] = field(default_factory=dict)
    logs: Logs = field(default_factory=dict)
    scores: tuple[float | None, ...] = ()


class Reward(Protocol):
    """Anything that scores generations: a model, a function in its process, a server, a judge."""

    def __call__(self, generations: Sequence[Generation]) -> RewardOutcome | Sequence[float | None]:
        """Return one value per generation, None where it does not apply."""
        ...


class BatchFailed(RewardError):
    """A batch has no rewards. `reason` says why in a line; a smaller batch may do where it is `divisible`."""

    def __init__(self, message: str, *, reason: str, divisible: bool = True) -> None:
        super().__init__(message)
        self.reason = shortened(reason)
        self.divisible = divisible


def as_outcome(answer: RewardOutcome | Sequence[float | None]) -> RewardOutcome:
    """Return what a `Reward` gave as an outcome."""
    return answer if isinstance(answer, RewardOutcome) else RewardOutcome(tuple(answer))


def check_length(name: str, outcome: RewardOutcome, generations: Sequence[Generation]) -> None:
    """Raise BatchFailed unless there is one value per generation: otherwise it is unknown which one is missing."""
    if len(outcome.values) != len(generations):
        problem = f"values for {len(generations)} generations"
        message = explain(f"rewards.{name}", len(outcome.values), problem, "return one for each")
        raise BatchFailed(message, reason=f"returned {len(outcome.values)} {problem}", divisible=False)


def screened(
    name: str, outcome: RewardOutcome, generations: Sequence[Generation], *, on_failure: OnFailure
) -> RewardOutcome:
    """Return `outcome` with every value that is no reward, NaN or absurd, made a failure; RewardError for `fail`."""
    check_length(name, outcome, generations)
    bad = {i: value for i, value in enumerate(outcome.values) if value is not None and not _is_reward(value)}
    if not bad:
        return outcome
    rule = f"must be finite and within +-{LARGEST_REWARD:g}"
    if on_failure == "fail":
        position, value = next(iter(bad.items()))
        generation = generations[position]
        key = f"rewards.{name}[prompt {generation.prompt.id}]"
        answer = generation.completion.text[:LONGEST_REASON]
        raise RewardError(explain(key, value, rule, f"fix the reward; the answer was {answer!r}"))
    values = tuple(None if i in bad else value for i, value in enumerate(outcome.values))
    failures = {**outcome.failures, **{i: f"returned {value}: {rule}" for i, value in bad.items()}}
    return RewardOutcome(values, failures, outcome.logs, outcome.scores)


def reason_of(error: RewardError) -> str:
    """Return why a batch failed, in a line that can be kept with a rollout."""
    return error.reason if isinstance(error, BatchFailed) else shortened(str(error))


def shortened(text: str) -> str:
    """Return `text` as one line of at most 200 characters, without secrets.

    >>> shortened("KeyError:\\n  'x'")
    "KeyError: 'x'"
    """
    line = " ".join(without_secrets(encodable(text)).split())
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 4] + " ..."


def merged_logs(parts: Sequence[Logs]) -> dict[str, tuple[float, int]]:
    """Return the sums and counts of all parts together.

    >>> merged_logs([{"hits": (1.0, 2)}, {"hits": (3.0, 2)}])
    {'hits': (4.0, 4)}
    """
    merged: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            before, seen = merged.get(name, (0.0, 0))
            merged[name] = (before + total, seen + count)
    return merged


def joined_scores(outcomes: Sequence[RewardOutcome]) -> tuple[float | None, ...]:
    """Return the scores of consecutive outcomes.

    >>> joined_scores([RewardOutcome((1.0,), scores=(0.5,)), RewardOutcome((1.0, 2.0))])
    (0.5, None, None)
    """
    if not any(outcome.scores for outcome in outcomes):
        return ()
    return tuple(score for one in outcomes for score in one.scores or (None,) * len(one.values))


def read_scores(value: Any, count: int) -> tuple[float | None, ...]:
    """Return what a function or server gave as `scores`, if it is one finite number or None for each of `count` answers.

    Empty if it is anything else, such as one number for all of them: that is only to be logged.

    >>> read_scores([1, None], 2), read_scores(0.5, 2), read_scores(["good", "bad"], 2)
    ((1.0, None), (), ())
    """
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        return ()
    flat = [one[0] if isinstance(one, (list, tuple)) and len(one) == 1 else one for one in listed]
    if not all(one is None or (isinstance(one, (int, float)) and math.isfinite(one)) for one in flat):
        return ()
    return tuple(None if one is None else float(one) for one in flat)


def _is_reward(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= LARGEST_REWARD


def checked(name: str, values: Sequence[float | None], generations: Sequence[Generation]) -> list[float]:
    """Return `values` if there is one finite and not absurd number per generation; RewardError otherwise."""
    outcome = screened(name, RewardOutcome(tuple(values)), generations, on_failure="fail")
    found: list[float] = []
    for value, generation in zip(outcome.values, generations, strict=True):
        if value is None:
            key = f"rewards.{name}[prompt {generation.prompt.id}]"
            raise RewardError(
                explain(key, None, "the reward function returned None", "return a number for every prompt")
            )
        found.append(value)
    return found
