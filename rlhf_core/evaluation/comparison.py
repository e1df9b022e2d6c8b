"""Compare policies by their answers to the same prompts: rewards with intervals, distance, style and win rates.

The unit of every interval is the prompt: several answers to one prompt are averaged first. Percentages are fractions,
lengths are in tokens, KL and entropy in nats. In an episode, only the tokens that the policy sampled count.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.evaluation.intervals import SHARE, bounds_of, difference_bounds, mean_interval
from rlhf_core.evaluation.metrics import correlation, distinct_n, entropy_estimate, repetition
from rlhf_core.types import CHAMPION, Completion, Generation

REPEATED_N = 3  # trigrams: shorter ones repeat in any text
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answers:
    """A policy's answers with measurements of each. A measurement that was not made is an empty tuple.

    `gold` and `scores` (of the reward model) have one value per generation. `log_ratios` has, per generation, the sum
    over tokens of log mu(token) - log pi_ref(token), where mu is the distribution sampled from.
    """

    name: str
    digest: str
    generations: tuple[Generation, ...]
    gold: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    log_ratios: tuple[float, ...] = ()
    kl_bound: float = math.nan
    """Upper bound of the KL of a best-of-n row, in nats, which replaces `log_ratios`."""
    picked_from: str = ""
    """Name of the policy whose answers these were picked from, or "" for a policy's own answers."""
    failed: int = 0
    """Number of episodes that could not be completed and are not among `generations`."""

    def __post_init__(self) -> None:
        if not self.generations:
            key = f"evaluate.generations.{self.name}"
            raise DataError(key, 0, "contains no answers", "generate answers first")
        for measure in (self.gold, self.scores, self.log_ratios):
            if measure and len(measure) != len(self.generations):
                raise ValueError(f"{self.name}: {len(measure)} values for {len(self.generations)} answers")

    @property
    def rewards(self) -> tuple[float, ...]:
        """The values that answers are compared by: gold rewards if there are any, else the reward model's scores."""
        return self.gold or self.scores

    def by_prompt(self, values: Sequence[float]) -> dict[str, list[float]]:
        """Group values by prompt ID, with prompts in the order of first appearance."""
        grouped: dict[str, list[float]] = {}
        for generation, value in zip(self.generations, values, strict=True):
            grouped.setdefault(generation.prompt.id, []).append(value)
        return grouped


def by_source(answers: Answers) -> dict[str, Answers]:
    """Split the answers by the source of their prompts; {} if all have the same source."""
    sources = [generation.prompt.source for generation in answers.generations]

    def of(source: str, values: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(value for value, own in zip(values, sources, strict=bool(values)) if own == source)

    return {
        source: replace(
            answers,
            generations=of(source, answers.generations),
            gold=of(source, answers.gold),
            scores=of(source, answers.scores),
            log_ratios=of(source, answers.log_ratios),
            failed=0,
        )
        for source in (sorted(set(sources)) if len(set(sources)) > 1 else ())
    }


def summary(answers: Answers, *, level: float) -> dict[str, Any]:
    """Summarize one policy as a JSON-compatible row.

    Means are {mean, low, high, prompts}, without the ends if one prompt gives none (`Interval.plain`). Missing measures
    are left out.
    """
    completions = [generation.completion for generation in answers.generations]
    tokens = [_sampled(completion, completion.token_ids) for completion in completions]
    lengths = [len(ids) for ids in tokens]
    prompts = answers.by_prompt(lengths)
    row: dict[str, Any] = {"digest": answers.digest, "prompts": len(prompts), "samples": len(lengths)}

    def mean(values: Sequence[float], bounds: tuple[float, float] | None = None) -> dict[str, Any]:
        by_prompt = [fmean(group) for group in answers.by_prompt(values).values()]
        return dict(mean_interval(by_prompt, bounds=bounds, level=level).plain())

    if answers.gold:
        row["gold"] = mean(answers.gold, bounds_of(answers.gold))
        row["gold_length_correlation"] = correlation(lengths, answers.gold)
    if answers.scores:
        row["reward_model"] = mean(answers.scores)
    if answers.gold and answers.scores:
        row["gold_reward_model_correlation"] = correlation(answers.gold, answers.scores)
    if answers.log_ratios:
        row["kl"] = mean(answers.log_ratios) | {"kind": "estimate"}
        row["kl_per_token"] = math.fsum(answers.log_ratios) / max(1, sum(lengths))
    elif not math.isnan(answers.kl_bound):
        row["kl"] = {"mean": answers.kl_bound, "low": answers.kl_bound, "high": answers.kl_bound, "kind": "bound"}
    row["tokens"] = mean(lengths)
    row["truncated"] = mean([float(completion.finish_reason == "length") for completion in completions], SHARE)
    row["entropy"] = entropy_estimate([_sampled(completion, completion.logprobs) for completion in completions])
    row["repetition"] = fmean(repetition(ids, REPEATED_N) for ids in tokens)
    row["distinct_2"] = distinct_n(tokens, 2)
    if answers.failed:
        row["failed"] = answers.failed
    return row


def _sampled(completion: Completion, values: Sequence[T]) -> list[T]:
    """Select the `values` (one per token) of the tokens that the policy sampled."""
    return [value for value, sampled in zip(values, completion.action_mask, strict=True) if sampled]


def best_of(answers: Answers, n: int, *, kl_bound: float) -> Answers:
    """Choose, per prompt, the answer with the highest reward model score among its first `n` answers.

    Raises ConfigError without scores, or if a prompt has fewer than `n` answers.
    """
    key = f"evaluate.best_of.{answers.name}"
    if not answers.scores:
        rule = "needs a reward model to choose the best answer"
        raise ConfigError(key, n, rule, "train one, or remove best_of")
    places = answers.by_prompt(range(len(answers.generations)))
    least = min(len(group) for group in places.values())
    if least < n:
        failed = f" ({answers.failed} episodes failed)" if answers.failed else ""
        rule = f"a prompt has only {least} answers{failed}"
        raise ConfigError(key, n, rule, "generate more per prompt, or choose a smaller n")
    picks = [int(max(group[:n], key=lambda i: answers.scores[int(i)])) for group in places.values()]
    return replace(
        answers,
        name=f"best-of-{n} ({answers.name})",
        generations=tuple(answers.generations[i] for i in picks),
        gold=tuple(answers.gold[i] for i in picks) if answers.gold else (),
        scores=tuple(answers.scores[i] for i in picks),
        log_ratios=(),
        kl_bound=kl_bound,
        picked_from=answers.name,
    )


def win_rate(ours: Answers, theirs: Answers, *, level: float) -> dict[str, Any]:
    """Count how often our answer is better, over all pairs of answers to shared prompts. A tie counts half."""
    return _paired(ours, theirs, _wins, bounds=SHARE, level=level)


def improvement(ours: Answers, theirs: Answers, *, level: float) -> dict[str, Any]:
    """The mean difference of the rewards on shared prompts, which is more precise than comparing two means."""
    bounds = difference_bounds(bounds_of(ours.rewards), bounds_of(theirs.rewards))
    return _paired(ours, theirs, lambda mine, other: fmean(mine) - fmean(other), bounds=bounds, level=level)


def challenges(ours: Answers, champion: Answers, *, level: float) -> dict[str, dict[str, Any]]:
    """The mean difference to the champion on shared prompts by `gold` and `reward_model`, if both have it.

    The names are `gold_over_champion` and `reward_model_over_champion`.
    """
    measures = {"gold": (ours.gold, champion.gold), "reward_model": (ours.scores, champion.scores)}
    return {
        f"{measure}_over_{CHAMPION}": improvement(
            replace(ours, gold=mine, scores=()), replace(champion, gold=theirs, scores=()), level=level
        )
        for measure, (mine, theirs) in measures.items()
        if mine and theirs
    }


def _paired(
    ours: Answers,
    theirs: Answers,
    compare: Callable[[Sequence[float], Sequence[float]], float],
    *,
    bounds: tuple[float, float] | None,
    level: float,
) -> dict[str, Any]:
    mine, other = ours.by_prompt(ours.rewards), theirs.by_prompt(theirs.rewards)
    shared = [prompt for prompt in mine if prompt in other]
    if not shared:
        names, remedy = f"{ours.name}, {theirs.name}", "generate both from the same evaluation prompts"
        raise DataError("evaluate.generations", names, "they have no prompts in common", remedy)
    interval = mean_interval([compare(mine[prompt], other[prompt]) for prompt in shared], bounds=bounds, level=level)
    return interval.plain() | {"against": theirs.name}


def _wins(mine: Sequence[float], other: Sequence[float]) -> float:
    return fmean(1.0 if a > b else 0.5 if a == b else 0.0 for a in mine for b in other)  # P(a > b) + P(a = b) / 2
