"""Replace prompts whose answers all have the same reward: dynamic sampling (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

from rlhf_core.config.policy_parts import DynamicSampling
from rlhf_core.errors import RewardError, explain
from rlhf_core.types import Generation, Rollout


class DynamicScoring:
    """Scores the answers of a step, and samples further rounds of it until enough groups carry a gradient."""

    def __init__(
        self,
        score: Callable[[Sequence[Generation]], list[Rollout]],
        sample_round: Callable[[int, int], list[Generation]],
        config: DynamicSampling,
        *,
        groups: int,
        group_size: int,
    ) -> None:
        """Take `sample_round(step, number)`, which returns the answers of further round `number` = 1, 2, ..."""
        self._score = score
        self._sample_round = sample_round
        self._config = config
        self._groups = groups
        self._group_size = group_size

    def __call__(self, step: int, generations: Sequence[Generation]) -> list[Rollout]:
        """Return `groups` whole groups; `generations` is the first round."""

        def draw(number: int) -> list[Rollout]:
            return self._score(self._sample_round(step, number) if number else generations)

        return sampled_until_decided(draw, self._config, groups=self._groups, group_size=self._group_size)


def sampled_until_decided(
    draw: Callable[[int], Sequence[Rollout]], config: DynamicSampling, *, groups: int, group_size: int
) -> list[Rollout]:
    """Return `groups` whole groups of rollouts that carry a gradient, in the order in which they were drawn.

    `draw(round)` returns the scored rollouts of a round, those of a prompt together. After `max_rounds` the groups that
    were passed over fill what is missing, so that a step has its size whatever happens.
    """
    decided: list[Sequence[Rollout]] = []
    passed_over: list[Sequence[Rollout]] = []
    for number in range(config.max_rounds):
        rollouts = draw(number)
        for start in range(0, len(rollouts), group_size):
            group = rollouts[start : start + group_size]
            (decided if is_decided(group, config) else passed_over).append(group)
        if len(decided) >= groups:
            break
    passed_over.sort(key=lambda group: any(rollout.invalid for rollout in group))  # stable: whole groups come first
    return [rollout for group in (decided + passed_over)[:groups] for rollout in group]


def is_decided(group: Sequence[Rollout], config: DynamicSampling) -> bool:
    """Return whether the figures of a group differ or, with bounds, whether their mean lies strictly between them.

    The figures are `judged_by`. A group with an invalid rollout is not decided.
    """
    if any(rollout.invalid for rollout in group):
        return False
    figures = judged_by(group)
    if config.low is None and config.high is None:
        return min(figures) != max(figures)
    mean = fmean(figures)
    return (config.low is None or mean > config.low) and (config.high is None or mean < config.high)


def judged_by(group: Sequence[Rollout]) -> list[float]:
    """Return the scores that were given beside the rewards of a group, or the rewards where none was.

    OpenRLHF filters by scores: rewards of +-1 with scores of 0 and 1 have bounds of 0 and 1. RewardError where some of a
    group have a score: a mean over both would be of nothing.
    """
    scores = [rollout.score for rollout in group if rollout.score is not None]
    if scores and len(scores) < len(group):
        rule = (
            f"dynamic sampling compares scores, but {len(scores)} of the {len(group)} answers to this prompt have one"
        )
        key = f"rewards.scores[prompt {group[0].prompt.id}]"
        raise RewardError(explain(key, scores, rule, "return a score for every answer, or for none"))
    return scores or [rollout.reward for rollout in group]
