"""Score for `rlhf serve-reward`: with a reward function in its process, or a trained reward model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlhf_core.errors import RewardError, explain
from rlhf_core.interfaces import Trainer
from rlhf_core.rewards.outcomes import Reward, RewardOutcome, as_outcome
from rlhf_core.rewards.server import Query, Score
from rlhf_core.types import Completion, Generation, Message, Prompt

Encode = Callable[[Query], tuple[int, ...]]


def function_score(reward: Reward) -> Score:
    """Return a scorer by `reward`: each prompt is one message of a user, as it was sent, and tokens are not known."""

    def score(queries: Sequence[Query]) -> RewardOutcome:
        outcome = as_outcome(reward([_generation(number, query) for number, query in enumerate(queries)]))
        return _checked(outcome, len(queries))

    return score


def reward_model_score(trainer: Trainer, encode: Encode, *, max_length: int) -> Score:
    """Return a scorer by a reward model that reads what `encode` makes of a query, cut to `max_length` tokens."""

    def score(queries: Sequence[Query]) -> RewardOutcome:
        sequences = [encode(query)[:max_length] for query in queries]
        if not all(sequences):
            raise RewardError(explain("query", "", "has no tokens to read a score from", "send prompt and answer"))
        return _checked(RewardOutcome(tuple(trainer.scores(sequences))), len(queries))

    return score


def as_it_stands(tokenize: Callable[[str], tuple[int, ...]]) -> Encode:
    """Return the encoding of queries that are rendered already, with special tokens as text, as OpenRLHF sends them.

    Nothing is added: no begin token (the template wrote it), and no end token to an answer that was cut off.
    """
    return lambda query: tokenize(query.text)


def rendered(answered: Callable[[str, str], tuple[int, ...]]) -> Encode:
    """Return the encoding of plain queries: the prompt as one message of a user in the template, answer, end of turn.

    `answered(prompt, answer)` returns these tokens as the reward model was trained on them.
    """

    def encode(query: Query) -> tuple[int, ...]:
        if not query.prompt or not query.text.startswith(query.prompt):
            raise RewardError(
                explain("prompts", query.prompt[:80], "the query does not begin with it", "send both, or no --render")
            )
        return answered(query.prompt, query.answer)

    return encode


def _generation(number: int, query: Query) -> Generation:
    prompt = Prompt(str(number), (Message("user", query.prompt),), query.label, "http")
    return Generation(prompt, (), Completion((), (), query.answer, "stop", 0, 0))


def _checked(outcome: RewardOutcome, count: int) -> RewardOutcome:
    """Raise RewardError unless there are `count` finite values: JSON has no NaN."""
    if len(outcome.values) != count:
        raise RewardError(explain("rewards", len(outcome.values), f"for {count} answers", "fix the reward"))
    for position, value in enumerate(outcome.values):
        if value is not None and not math.isfinite(value):
            raise RewardError(explain(f"rewards[{position}]", value, "is not a finite number", "fix the reward"))
    return outcome
