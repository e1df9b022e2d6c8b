"""Compute what the answers of a step say about the policy's health: whether they repeat, resemble each other, and end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from rlhf_core.evaluation.metrics import distinct_n, repetition
from rlhf_core.interfaces import Metrics
from rlhf_core.types import Completion

ANSWERS, TOKENS = 256, 512
"""The numbers of answers of a step, and of first tokens of each, whose n-grams are counted: a fraction of a second."""


def answer_metrics(completions: Sequence[Completion], *, ends: Sequence[int]) -> Metrics:
    """Return `rollout/unique`, `distinct_2`, `repetition` and `ended` of the answers of a step.

    `unique` is the share of different texts, `distinct_2` that of different pairs of tokens among all pairs, `repetition`
    the mean share of 3-grams that an answer has had before. `ended` is the share of answers with an end token, one of
    `ends`, among those that ended by themselves, and 1 if none did.
    """
    shown = [completion.token_ids[:TOKENS] for completion in completions[:ANSWERS]]
    stopped = [completion for completion in completions if completion.finish_reason == "stop"]
    return {
        "rollout/unique": len({completion.text for completion in completions}) / len(completions),
        "rollout/distinct_2": distinct_n(shown, 2),
        "rollout/repetition": fmean(repetition(tokens, 3) for tokens in shown),
        "rollout/ended": fmean(one.token_ids[-1] in ends for one in stopped) if stopped else 1.0,
    }


def zero_variance(rewards: Sequence[float], *, group_size: int) -> Metrics:
    """Return `rollout/zero_variance`, the share of groups whose answers all earn the same; {} without groups."""
    if group_size < 2:
        return {}
    groups = [rewards[start : start + group_size] for start in range(0, len(rewards), group_size)]
    return {"rollout/zero_variance": fmean(min(group) == max(group) for group in groups)}
