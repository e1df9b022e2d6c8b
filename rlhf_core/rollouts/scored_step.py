"""Score the answers of a step, once: the rollouts are logged, and a resumed run takes them from there.

Rollouts without a reward are left out with their whole group: they are never scored 0, and never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_core.config.policy import PPOConfig
from rlhf_core.data.rollout_log import Drawn, RolloutLog
from rlhf_core.errors import RewardError, explain
from rlhf_core.interfaces import Metrics
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.answer_metrics import answer_metrics, zero_variance
from rlhf_core.rollouts.answers import episode_metrics
from rlhf_core.rollouts.dynamic_sampling import is_decided
from rlhf_core.store.failures import Counts
from rlhf_core.types import Generation, Rollout

ScoreAnswers = Callable[[int, Sequence[Generation]], list[Rollout]]
"""(step, its answers) -> scored rollouts of that step, of these answers or of others that replace them."""


class StepScorer:
    """Scores what was sampled for a step; logs the rollouts of the last `keep_steps` steps.

    >>> rollouts = score(step, sampler.generate(step))     # doctest: +SKIP
    """

    def __init__(
        self,
        scorer: Scorer,
        log: RolloutLog,
        *,
        group_size: int,
        keep_steps: int,
        note_failed: Callable[[int, Counts], None],
        score_answers: ScoreAnswers,
    ) -> None:
        self._scorer = scorer
        self._log = log
        self._group_size = group_size
        self._keep_steps = keep_steps
        self._note_failed = note_failed
        self._score_answers = score_answers

    def __call__(self, step: int, drawn: Drawn) -> list[Rollout]:
        """Return the rollouts of the groups in which every one is valid. RewardError if there is no such group."""
        self._scorer.at_step(step)
        kept = self._log.read(step, policy=drawn.policy)
        if kept is not None:
            self._scorer.restore(kept.scorer)
            return valid_groups(kept.rollouts, group_size=self._group_size)
        rollouts = self._score_answers(step, drawn.generations)
        valid = valid_groups(rollouts, group_size=self._group_size)  # first: a step without any is not kept
        self._note_failed(step, self._scorer.failed())  # before they are kept: a kill in between would lose the note
        self._log.write(step, rollouts, self._scorer.state(), policy=drawn.policy, pool=drawn.pool)
        self._log.forget(before=step - self._keep_steps)
        return valid


def score_once(scorer: Scorer) -> ScoreAnswers:
    """Return the scoring of the answers as they are, whatever their rewards."""

    def score(step: int, generations: Sequence[Generation]) -> list[Rollout]:
        return scorer(generations)

    return score


def valid_groups(rollouts: Sequence[Rollout], *, group_size: int) -> list[Rollout]:
    """Return the groups of `group_size` consecutive rollouts in which every one is valid.

    A group that lost a member would be compared with another baseline. RewardError if no group is left.
    """
    groups = [rollouts[start : start + group_size] for start in range(0, len(rollouts), group_size)]
    kept = [rollout for group in groups if not any(one.invalid for one in group) for rollout in group]
    if rollouts and not kept:
        first = next(rollout for rollout in rollouts if rollout.invalid)
        where = f"rewards[prompt {first.prompt.id}]"
        raise RewardError(explain(where, first.invalid, "every group of the step has an invalid rollout", "fix it"))
    return kept


def rollout_metrics(
    config: PPOConfig, step: int, drawn: Drawn, rollouts: Sequence[Rollout], *, ahead: int, ends: Sequence[int]
) -> Metrics:
    """Return `rollout/*`: staleness, what episodes report, groups that are undecided, equal or in flight, and the answers' health.

    `ahead` counts the later steps that are being sampled, `ends` are the tokens that end an answer.
    """
    size = config.samples_per_prompt
    # The segments of partial rollouts are spans as well, and no turns.
    episodes = episode_metrics([one.completion for one in drawn.generations]) if config.agent else {}
    in_flight = float(ahead * config.prompts_per_step + len(drawn.pool.samples) // size)
    undecided: Metrics = {}
    if config.dynamic_sampling is not None:
        bounds = config.dynamic_sampling
        groups = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        undecided["rollout/undecided_groups"] = float(sum(not is_decided(group, bounds) for group in groups))
    equal = zero_variance([one.reward for one in rollouts], group_size=size)
    health = answer_metrics([one.completion for one in rollouts], ends=ends)
    if config.agent:
        del health["rollout/ended"]  # the last word of an episode may be its environment's
    return staleness(rollouts, step) | episodes | undecided | equal | health | {"rollout/in_flight": in_flight}


def staleness(rollouts: Sequence[Rollout], step: int) -> Metrics:
    """Return how many updates the policy of `step` is ahead of those that sampled, over the sampled tokens."""
    ages: list[tuple[int, int]] = []  # age, tokens
    for rollout in rollouts:
        made = rollout.completion
        spans = [(span.policy_version, span.end - span.start) for span in made.spans]
        ages += [(step - version, tokens) for version, tokens in spans or [(made.policy_version, len(made.token_ids))]]
    mean = sum(age * tokens for age, tokens in ages) / sum(tokens for _, tokens in ages)
    return {"rollout/staleness": mean, "rollout/staleness_max": float(max(age for age, _ in ages))}
