"""Score the answers of a step, once: the rollouts are logged, and a resumed run takes them from there.

Rollouts without a reward are left out with their whole group: they are never scored 0, and never dropped in silence.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.config.policy import DynamicSampling, PartialRollouts, PPOConfig
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.shards import Drawn, RolloutLog
from rlhf_core.errors import RewardError
from rlhf_core.evaluation.metrics import distinct_n, repetition
from rlhf_core.interfaces import Metrics, Sampler
from rlhf_core.rewards.scoring import Scorer
from rlhf_core.rollouts.answers import (
    SINGLE_TURN,
    AheadSampler,
    DrawAnswers,
    OnPolicySampler,
    OpenEnvironments,
    PartialAnswers,
    StepSampler,
    WholeAnswers,
    episode_metrics,
    expect_weights,
)
from rlhf_core.rollouts.prompts import BandOrder
from rlhf_core.stage.failures import Counts
from rlhf_core.types import Completion, Generation, Prompt, Rollout, SamplingRequest, chunks

# ---------------------------------------------------------------- dynamic sampling


@dataclass(frozen=True)
class DynamicScoring:
    """Scores the answers of a step, and samples further rounds of it until enough groups carry a gradient."""

    score: Callable[[Sequence[Generation]], list[Rollout]]
    sample_round: Callable[[int, int], list[Generation]]
    """(step, number) -> answers of its further round `number` = 1, 2, ..."""
    config: DynamicSampling
    groups: int
    group_size: int

    def __call__(self, step: int, generations: Sequence[Generation]) -> list[Rollout]:
        """Score and sample until `groups` groups are whole; `generations` is the first round."""

        def draw(number: int) -> list[Rollout]:
            return self.score(self.sample_round(step, number) if number else generations)

        return sampled_until_decided(draw, self.config, groups=self.groups, group_size=self.group_size)


def sampled_until_decided(
    draw: Callable[[int], Sequence[Rollout]], config: DynamicSampling, *, groups: int, group_size: int
) -> list[Rollout]:
    """Draw until `groups` whole groups of rollouts carry a gradient, in the order in which they were drawn.

    `draw(round)` returns the scored rollouts of a round, grouped by prompt. After `max_rounds`, groups that were passed
    over fill the step, so that it always has its full size.
    """
    decided: list[Sequence[Rollout]] = []
    passed_over: list[Sequence[Rollout]] = []
    for number in range(config.max_rounds):
        for group in chunks(draw(number), group_size):
            (decided if is_decided(group, config) else passed_over).append(group)
        if len(decided) >= groups:
            break
    passed_over.sort(key=lambda group: any(rollout.invalid for rollout in group))  # stable: whole groups come first
    return [rollout for group in (decided + passed_over)[:groups] for rollout in group]


def is_decided(group: Sequence[Rollout], config: DynamicSampling) -> bool:
    """Whether the figures of a group differ or, with bounds, whether their mean lies strictly between them.

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
    """The scores that were returned besides the rewards of a group, or the rewards if there are none.

    OpenRLHF filters by scores: rewards of +-1 with scores of 0 and 1 have bounds of 0 and 1. RewardError where some of a
    group have a score: a mean over both would be of nothing.
    """
    scores = [rollout.score for rollout in group if rollout.score is not None]
    if scores and len(scores) < len(group):
        rule = (
            f"dynamic sampling compares scores, but {len(scores)} of the {len(group)} answers to this prompt have one"
        )
        key = f"rewards.scores[prompt {group[0].prompt.id}]"
        raise RewardError(key, scores, rule, "return a score for every answer, or for none")
    return scores or [rollout.reward for rollout in group]


# ---------------------------------------------------------------- answer metrics

ANSWERS, TOKENS = 256, 512
"""The numbers of answers of a step, and of first tokens of each, whose n-grams are counted: a fraction of a second."""


def answer_metrics(completions: Sequence[Completion], *, ends: Sequence[int], stop: Sequence[str] = ()) -> Metrics:
    """Compute `rollout/unique`, `distinct_2`, `repetition` and `ended` of the answers of a step.

    `unique` is the share of different texts, `distinct_2` the share of different pairs of tokens among all pairs,
    `repetition` the mean share of 3-grams that an answer has had before. `ended` is the share of answers with an end
    token, one of `ends`, among answers that ended by themselves and not by a text in `stop`, and 1 if none did.
    """
    shown = [completion.token_ids[:TOKENS] for completion in completions[:ANSWERS]]
    stopped = [one for one in completions if one.finish_reason == "stop" and not any(text in one.text for text in stop)]
    return {
        "rollout/unique": len({completion.text for completion in completions}) / len(completions),
        "rollout/distinct_2": distinct_n(shown, 2),
        "rollout/repetition": fmean(repetition(tokens, 3) for tokens in shown),
        "rollout/ended": fmean(one.token_ids[-1] in ends for one in stopped) if stopped else 1.0,
    }


def zero_variance(rewards: Sequence[float], *, group_size: int) -> Metrics:
    """Measure `rollout/zero_variance`, the share of groups whose answers all earn the same; {} without groups."""
    if group_size < 2:
        return {}
    groups = chunks(rewards, group_size)
    return {"rollout/zero_variance": fmean(min(group) == max(group) for group in groups)}


def source_metrics(rollouts: Sequence[Rollout], group_size: int) -> Metrics:
    """Report reward, length and equal groups by the source of the prompts, if there are several sources."""
    sources = sorted({one.prompt.source for one in rollouts})
    found: Metrics = {}
    for source in sources if len(sources) > 1 else ():
        own = [one for one in rollouts if one.prompt.source == source]
        rewards = [one.reward for one in own]
        equal = zero_variance(rewards, group_size=group_size)
        found |= {
            f"source/{source}/reward": fmean(rewards),
            f"source/{source}/length": fmean(len(one.completion.token_ids) for one in own),
            **{f"source/{source}/{name.removeprefix('rollout/')}": value for name, value in equal.items()},
        }
    return found


# ---------------------------------------------------------------- scored step


@dataclass(frozen=True, kw_only=True)
class StepScorer:
    """Scores the samples of a step; logs the rollouts of the last `keep_steps` steps."""

    scorer: Scorer
    log: RolloutLog
    group_size: int
    keep_steps: int
    note_failed: Callable[[int, Counts], None]
    dynamic: DynamicScoring | None
    """How undecided groups are replaced; None scores the answers unchanged."""

    def __call__(self, step: int, drawn: Drawn) -> Sequence[Rollout]:
        """Score the step: rollouts of the groups in which every one is valid. RewardError if no group is."""
        self.scorer.at_step(step)
        kept = self.log.read(step, policy=drawn.policy)
        if kept is not None:
            self.scorer.restore(kept.scorer)
            return valid_groups(kept.rollouts, group_size=self.group_size)
        answers = drawn.generations
        rollouts = self.scorer(answers) if self.dynamic is None else self.dynamic(step, answers)
        valid = valid_groups(rollouts, group_size=self.group_size)  # first: a step without any is not kept
        self.note_failed(step + 1, self.scorer.failed())  # before they are kept: a kill would lose the note
        self.log.forget(before=step - self.keep_steps)
        self.log.write(step, rollouts, self.scorer.state(), policy=drawn.policy, pool=drawn.pool)
        return valid


def valid_groups(rollouts: Sequence[Rollout], *, group_size: int) -> Sequence[Rollout]:
    """Select the groups of `group_size` consecutive rollouts in which every one is valid.

    A group that lost a member would be compared with another baseline; the log has the first reason. RewardError if no group
    is left.
    """
    invalid = [one for one in rollouts if one.invalid]
    if not invalid:
        return rollouts
    groups = chunks(rollouts, group_size)
    kept = [rollout for group in groups if not any(one.invalid for one in group) for rollout in group]
    first, lost = invalid[0], len(rollouts) - len(kept)
    if not kept:
        where = f"rewards[prompt {first.prompt.id}]"
        raise RewardError(where, first.invalid, "every group of the step has an invalid rollout", "fix it")
    text = "%d of %d rollouts are invalid, %d are left out with them; the first, of prompt %s: %s"
    logger.warning(text, len(invalid), len(rollouts), lost - len(invalid), first.prompt.id, first.invalid)
    return kept


def rollout_metrics(
    step: int, drawn: Drawn, rollouts: Sequence[Rollout], config: PPOConfig, *, ahead: int, ends: Sequence[int]
) -> Metrics:
    """Collect `rollout/*`: staleness, episode reports, undecided, equal or in-flight groups, and the answers' health.

    `ahead` counts the later steps that are being sampled, `ends` are the tokens that end an answer.
    """
    group_size, episodes = config.samples_per_prompt, bool(config.agent or config.agents)
    # The segments of partial rollouts are spans as well, and no turns.
    reported = episode_metrics([one.completion for one in drawn.generations]) if episodes else {}
    in_flight = float(ahead * config.prompts_per_step + len(drawn.pool.samples) // group_size)
    undecided: Metrics = {}
    if isinstance(config.ahead, DynamicSampling):
        groups = chunks(rollouts, group_size)
        undecided["rollout/undecided_groups"] = float(sum(not is_decided(group, config.ahead) for group in groups))
    equal = zero_variance([one.reward for one in rollouts], group_size=group_size) | source_metrics(
        rollouts, group_size
    )
    health = answer_metrics([one.completion for one in rollouts], ends=ends, stop=config.sampling.stop)
    if episodes:
        del health["rollout/ended"]  # the last word of an episode may be its environment's
    return staleness(rollouts, step) | reported | undecided | equal | health | {"rollout/in_flight": in_flight}


def staleness(rollouts: Sequence[Rollout], step: int) -> Metrics:
    """Measure how many updates the policy of `step` is ahead of the sampling policies, over the sampled tokens."""
    ages: list[tuple[int, int]] = []  # age, tokens
    for rollout in rollouts:
        made = rollout.completion
        spans = [(span.policy_version, span.end - span.start) for span in made.spans]
        ages += [(step - version, tokens) for version, tokens in spans or [(made.policy_version, len(made.token_ids))]]
    mean = sum(age * tokens for age, tokens in ages) / sum(tokens for _, tokens in ages)
    return {"rollout/staleness": mean, "rollout/staleness_max": float(max(age for age, _ in ages))}


# ---------------------------------------------------------------- greedy

logger = logging.getLogger(__name__)


def with_greedy_rewards(
    engine: Sampler,
    rollouts: Sequence[Rollout],
    sampling: SamplingConfig,
    scorer: Scorer,
    *,
    step: int,
    group_size: int,
    note_failed: Callable[[int, Counts], None],
) -> tuple[Sequence[Rollout], tuple[float, ...]]:
    """Score the likeliest answer to each prompt: the rollouts with such a baseline, and the baseline of each.

    The policy that `engine` holds answers each prompt's tokens once, and the answer is scored for each prompt that has
    them, since its label may be another. Values that `scorer` normalizes are used without normalization (`comparable`).
    Where such an answer has no reward, the prompt's rollouts are invalid and left out; `note_failed` is called with the
    number that the step has once it is made, and the failures of the rollouts and of these answers together. Raises
    RewardError if no prompt is left.
    """
    asked = list(dict.fromkeys(one.prompt_ids for one in rollouts))
    made = engine.generate([SamplingRequest(ids, 0) for ids in asked], sampling.model_copy(update={"temperature": 0.0}))
    expect_weights(engine)
    answers = dict(zip(asked, made, strict=True))
    prompts = {(one.prompt.id, one.prompt_ids): one.prompt for one in rollouts}
    comparable = scorer.comparable()
    comparable.at_step(step)
    scored = comparable([Generation(prompt, ids, answers[ids]) for (_, ids), prompt in prompts.items()])
    note_failed(step + 1, _added(scorer.failed(), comparable.failed()))
    greedy = dict(zip(prompts, scored, strict=True))
    for name, one in greedy.items():
        if one.invalid:
            logger.warning("step %d: prompt %s has no greedy answer with a reward (%s)", step, name[0], one.invalid)
    marked = [_based(one, greedy[one.prompt.id, one.prompt_ids]) for one in rollouts]
    kept = valid_groups(marked, group_size=group_size)
    return kept, tuple(greedy[one.prompt.id, one.prompt_ids].reward for one in kept)


def _based(rollout: Rollout, greedy: Rollout) -> Rollout:
    """The rollout, invalid if its baseline is."""
    if not greedy.invalid:
        return rollout
    return replace(rollout, reward=math.nan, invalid=f"no baseline, greedy answer: {greedy.invalid}")


def _added(counts: Counts, more: Counts) -> Counts:
    both = {path: (counts.get(path, (0, 0)), more.get(path, (0, 0))) for path in {**counts, **more}}
    return {path: (one[0] + other[0], one[1] + other[1]) for path, (one, other) in both.items()}


# ---------------------------------------------------------------- sampler and scorer of a run


@contextmanager
def open_rollouts(
    config: PPOConfig,
    engine: Sampler,
    scorer: Scorer,
    chat: ChatTemplate,
    prompts: Sequence[Prompt],
    log: RolloutLog,
    *,
    seed: int,
    environments: OpenEnvironments = SINGLE_TURN,
    band: BandOrder | None = None,
    note_failed: Callable[[int, Counts], None] = lambda step, counts: None,
) -> Iterator[tuple[StepSampler, StepScorer]]:
    """Yield the sampler and the scorer of each step, as `[ppo.ahead]` chooses; leave before the engines' leases end.

    Every sample has its own seed, so a restart draws the same answers. `note_failed` is called with the number that a
    step has once it is made and how many of its answers failed, before they are written to the `log`.
    """
    ahead, groups, size = config.ahead, config.prompts_per_step, config.samples_per_prompt
    drawn: dict[str, Any] = {"engine": engine, "chat": chat, "prompts": prompts, "sampling": config.sampling}
    drawn |= {"mixture": config.mixture, "schedule": config.schedule}
    drawn |= {"groups": groups, "group_size": size, "seed": seed, "shuffles": config.order == "shuffled"}
    whole = WholeAnswers(**drawn, environments=environments, band=band, routed_experts=config.router_replay)
    draw: DrawAnswers = whole
    dynamic: DynamicScoring | None = None
    if isinstance(ahead, PartialRollouts):
        in_flight = ahead.in_flight_groups or 2 * groups
        draw = PartialAnswers(**drawn, tokens=ahead.tokens, in_flight_groups=in_flight)
    elif isinstance(ahead, DynamicSampling):
        dynamic = DynamicScoring(scorer, whole.sample_round, ahead, groups, size)
    greedy = config.estimator is not None and config.estimator.asks_greedy
    once = not (config.staleness or dynamic or greedy)
    sampler = OnPolicySampler(engine, log, draw, band=band, once=once)
    keep = config.checkpoint_every
    score = StepScorer(
        scorer=scorer,
        log=log,
        group_size=size,
        keep_steps=keep,
        note_failed=note_failed,
        dynamic=dynamic,
    )
    if not config.staleness:
        yield sampler, score
        return
    with AheadSampler(sampler, staleness=config.staleness, steps=config.steps, group_size=size, band=band) as sampling:
        yield sampling, score
