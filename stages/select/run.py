"""Selection from scored rollouts: answers to imitate (rejection sampling, RAFT) or pairs to prefer (iterative DPO)."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeAlias, TypeVar

from rlhf_core.data.chat import answer_message
from rlhf_core.data.mixing import split_by_prompt
from rlhf_core.data.shards import read_index, read_rollouts
from rlhf_core.data.tables import (
    DIFFICULTY,
    Demonstration,
    Preference,
    write_demonstrations,
    write_preferences,
    write_prompts,
)
from rlhf_core.errors import DataError, nearest
from rlhf_core.interfaces import Metrics
from rlhf_core.stage.context import StageContext
from rlhf_core.types import DemonstrationsRef, PreferencesRef, Prompt, PromptsRef, Rollout, RolloutsRef, derive_seed
from stages.select import BestOfN, Pairs, PromptsInBand, Selection, Threshold, TopK

TABLE_ROWS = 16  # in the tracker
DIFFICULTIES = ("kept", "too_hard", "too_easy", "without_term", "failed", "above_limit")
BINS = 10  # of the histogram of means

Group: TypeAlias = list[Rollout]
"""The rollouts of one prompt, in the order of sampling."""
T = TypeVar("T")


# ---------------------------------------------------------------- the stage


def run(
    config: BestOfN | TopK | Threshold | Pairs | PromptsInBand,
    *,
    rollouts: RolloutsRef | None = None,
    pool: dict[str, RolloutsRef] | None = None,
    context: StageContext,
) -> DemonstrationsRef | PreferencesRef | PromptsRef:
    """Demonstrations, or preferences for `pairs`, split by prompt into train and eval; or `prompts`.

    The answers to a prompt come from `rollouts`, or from all rollouts in `pool`.
    """
    given = pool or {} if rollouts is None else {"rollouts": rollouts}
    found = {name: read_rollouts(context.path(ref)) for name, ref in given.items()}
    everything = [one for rows in found.values() for one in rows]
    valid = [rollout for rollout in everything if not rollout.invalid]
    if isinstance(config, PromptsInBand):
        return select_prompts(config, by_prompt(everything, drop_truncated=False), context)
    groups = by_prompt(valid, drop_truncated=config.drop_truncated)
    counts = {
        "prompts": float(len(groups)),
        "truncated": float(len(valid) - sum(map(len, groups))),
        "invalid": float(len(everything) - len(valid)),
    }
    if isinstance(config, Pairs):
        owners: dict[int, str] = {}
        if config.compares_policies:
            # By name if the profile names policies, else by digest: one policy may have answered in two steps.
            names = {one: one if config.chosen else read_index(context.path(given[one]))["policy"] for one in given}
            owners = {id(one): names[name] for name, rows in found.items() for one in rows}
        pairs, dropped = make_pairs(groups, config, owners, seed=context.seed)
        for split, part in splits(pairs, lambda pair: pair.chosen.prompt.id, config, seed=context.seed).items():
            write_preferences(context.out / f"{split}.parquet", [preference(pair) for pair in part])
            counts[split] = len(part)
        record_pairs(pairs, context)
        return context.commit(PreferencesRef, metrics=counts | dropped | pair_metrics(pairs))

    chosen = [rollout for group in groups for rollout in best(group, config)]
    for split, kept in splits(chosen, lambda one: one.prompt.id, config, seed=context.seed).items():
        write_demonstrations(context.out / f"{split}.parquet", demonstrations(kept))
        counts[split] = len(kept)
    record_demonstrations(chosen, context)
    gain = {"reward/all": _mean_reward(valid), "reward/selected": _mean_reward(chosen)}
    return context.commit(DemonstrationsRef, metrics=counts | gain)


def by_prompt(rollouts: Sequence[Rollout], *, drop_truncated: bool) -> list[Group]:
    """Group the rollouts by prompt, in order of first appearance. A prompt may end up with no rollouts."""
    groups: dict[str, Group] = {}
    for rollout in rollouts:
        group = groups.setdefault(rollout.prompt.id, [])
        if not (drop_truncated and rollout.completion.finish_reason == "length"):
            group.append(rollout)
    return list(groups.values())


# ---------------------------------------------------------------- demonstrations


def best(group: Group, config: BestOfN | TopK | Threshold) -> Group:
    """The answers of a prompt to imitate, best first.

    Ties, and copies of a text, are resolved in favor of the first one.
    """
    ranked = sorted(_different(group), key=lambda rollout: -rollout.reward)
    match config:
        case BestOfN():
            return ranked[:1]
        case TopK(k=k):
            return ranked[:k]
        case Threshold(minimum=minimum):
            return [rollout for rollout in ranked if rollout.reward >= minimum]


def demonstrations(rollouts: Sequence[Rollout]) -> list[Demonstration]:
    """Join each answer with its prompt as a conversation; its id is the prompt's id with a running number."""
    numbers: Counter[str] = Counter()
    rows = []
    for rollout in rollouts:
        prompt = rollout.prompt
        messages = (*prompt.messages, answer_message(rollout))
        rows.append(Demonstration(f"{prompt.id}/{numbers[prompt.id]}", messages, prompt.source))
        numbers[prompt.id] += 1
    return rows


# ---------------------------------------------------------------- prompts


def select_prompts(config: PromptsInBand, groups: Sequence[Group], context: StageContext) -> PromptsRef:
    """Select the prompts in the band; `difficulty.json` has every prompt's mean, and by source counts and a histogram.

    Raises DataError if none is left, and for a term that no answer has.
    """
    means = {group[0].prompt: mean_of(group, config.term) for group in groups}
    if all(mean is None for mean in means.values()):
        known = sorted({name for group in groups for one in group for name in one.reward_components})
        raise DataError("select.term", config.term, "no answer has this term", nearest(config.term, known))
    failed = {group[0].prompt for group in groups if all(one.invalid for one in group)}
    kept = [prompt for prompt, mean in means.items() if mean is not None and config.low <= mean <= config.high]
    if config.per_source:
        kept = capped(kept, config.per_source, seed=context.seed)

    # The counts are in the error, too: they tell on which side of the band the prompts are.
    names = sorted({one.source for one in means})
    sources = {source: counts_of(source, means, kept, failed, config) for source in names}
    if not kept:
        rule = f"no prompt has a mean from {config.low} to {config.high}: {json.dumps(sources)}"
        raise DataError("select.low", config.low, rule, "widen the band, or sample more answers")
    write_prompts(context.out, kept)
    valid = [sum(not one.invalid for one in group) for group in groups]
    rows = [{"id": prompt.id, "source": prompt.source, "mean": mean, "answers": count}
            for (prompt, mean), count in zip(means.items(), valid, strict=True)]  # fmt: skip
    edges, histogram = histograms(means)
    report = {"sources": sources, "edges": edges, "histogram": histogram, "prompts": rows}
    (context.out / DIFFICULTY).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    bins = list(pairwise(edges))
    table = [[name, *place, count] for name in names for place, count in zip(bins, histogram[name], strict=True)]
    context.tracker.table("difficulty", ["source", "mean from", "to", "prompts"], table)
    metrics = {"prompts": float(len(means))}
    metrics |= {name: float(sum(counts[name] for counts in sources.values())) for name in DIFFICULTIES}
    for source, counts in sources.items():
        metrics |= {f"source/{source}/{name}": float(count) for name, count in counts.items()}
    return context.commit(PromptsRef, metrics=metrics)


def histograms(means: Mapping[Prompt, float | None]) -> tuple[list[float], dict[str, list[int]]]:
    """Edges of equal bins over all means, at least from 0 to 1, and the number of prompts in each by source.

    >>> prompts = [Prompt(name, (), "", "sums") for name in "abc"]
    >>> edges, counts = histograms(dict(zip(prompts, [0.0, 0.55, 1.0])))
    >>> edges[:3], counts
    ([0.0, 0.1, 0.2], {'sums': [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]})
    """
    present = [mean for mean in means.values() if mean is not None]
    low, high = min(0.0, *present), max(1.0, *present)
    counts = {source: [0] * BINS for source in sorted({prompt.source for prompt in means})}
    for prompt, mean in means.items():
        if mean is not None:
            counts[prompt.source][min(int((mean - low) / (high - low) * BINS), BINS - 1)] += 1
    return [low + (high - low) * edge / BINS for edge in range(BINS + 1)], counts


def mean_of(group: Group, term: str) -> float | None:
    """Mean of a term over the valid answers to a prompt, of the reward for ""; None if it applies to none."""
    values = [one.reward if not term else one.reward_components.get(term) for one in group if not one.invalid]
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def capped(prompts: Sequence[Prompt], most: int, *, seed: int) -> list[Prompt]:
    """At most `most` prompts of each source, chosen at random, in their order."""
    chosen = sorted(prompts, key=lambda one: derive_seed(seed, "select", one.id))
    taken: defaultdict[str, list[str]] = defaultdict(list)
    for prompt in chosen:
        taken[prompt.source] += [prompt.id] * (len(taken[prompt.source]) < most)
    return [prompt for prompt in prompts if prompt.id in taken[prompt.source]]


def counts_of(
    source: str,
    means: Mapping[Prompt, float | None],
    kept: Sequence[Prompt],
    failed: Collection[Prompt],
    config: PromptsInBand,
) -> dict[str, int]:
    """Count the prompts of a source that are kept, and that are not, by reason."""
    own = {prompt: mean for prompt, mean in means.items() if prompt.source == source}
    counts = {
        "kept": sum(prompt.source == source for prompt in kept),
        "too_hard": sum(mean is not None and mean < config.low for mean in own.values()),
        "too_easy": sum(mean is not None and mean > config.high for mean in own.values()),
        "without_term": sum(mean is None and prompt not in failed for prompt, mean in own.items()),
        "failed": sum(prompt in failed for prompt in own),
    }
    return counts | {"above_limit": len(own) - sum(counts.values())}


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt. `margin` > 0 is the difference of their rewards, length penalty included."""

    chosen: Rollout
    rejected: Rollout
    margin: float


def make_pairs(
    groups: Sequence[Group], config: Pairs, owners: Mapping[int, str] | None = None, *, seed: int
) -> tuple[list[Pair], Metrics]:
    """At most one pair per prompt, and why the other prompts gave none.

    - `too_few`: fewer than two different answers, or none of two `owners`
    - `ties`: equal rewards
    - `below_margin`: closer than `margin_threshold`

    `owners` are the names or digests of the policies, by the `id` of each rollout.
    """
    pairs: list[Pair] = []
    dropped = {"too_few": 0.0, "ties": 0.0, "below_margin": 0.0}
    for group in groups:
        answers, pair = _different(group), None
        if group:
            generator = random.Random(derive_seed(seed, "select", group[0].prompt.id))
            if owners:
                pair = _pair_across(group, config, generator, owners)
            elif len(answers) > 1:
                pair = _pair(answers, config, generator)
        if pair is None:
            dropped["too_few"] += 1
        elif config.chosen:
            pairs.append(
                replace(pair, margin=max(pair.margin, 0.0))
            )  # the policy decides, and a margin is not negative
        elif pair.margin == 0:
            dropped["ties"] += 1
        elif pair.margin < config.margin_threshold:
            dropped["below_margin"] += 1
        else:
            pairs.append(pair)
    return pairs, dropped


def preference(pair: Pair) -> Preference:
    """The row of a pair."""
    prompt = pair.chosen.prompt
    chosen, rejected = answer_message(pair.chosen), answer_message(pair.rejected)
    return Preference(prompt.id, prompt.messages, (chosen,), (rejected,), pair.margin, prompt.source)


def pair_metrics(pairs: Sequence[Pair]) -> Metrics:
    """Mean rewards, margin and lengths (tokens) of both sides: DPO learns a length gap first."""
    chosen, rejected = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
    return {
        "reward/chosen": _mean_reward(chosen),
        "reward/rejected": _mean_reward(rejected),
        "margin": fmean(pair.margin for pair in pairs),
        "length/chosen": fmean(_sampled_tokens(one) for one in chosen),
        "length/rejected": fmean(_sampled_tokens(one) for one in rejected),
    }


def _value(rollout: Rollout, config: Pairs) -> float:
    """The reward by which answers are ranked: less for each sampled token."""
    return rollout.reward - config.length_penalty * _sampled_tokens(rollout)


def _pair(answers: Group, config: Pairs, generator: random.Random) -> Pair:
    """The pair of a prompt by the rule, whichever policy gave the answers."""
    ranked = sorted(answers, key=lambda rollout: -_value(rollout, config))
    match config.rule:
        case "max_min":
            chosen, rejected = ranked[0], ranked[-1]
        case "max_random":
            chosen, rejected = ranked[0], generator.choice(ranked[1:])
        case "random":
            chosen, rejected = sorted(generator.sample(ranked, 2), key=lambda rollout: -_value(rollout, config))
    return Pair(chosen, rejected, _value(chosen, config) - _value(rejected, config))


def _pair_across(group: Group, config: Pairs, generator: random.Random, owners: Mapping[int, str]) -> Pair | None:
    """Pair two answers of different owners: the owners `chosen` and `rejected` where given. None if impossible.

    The better answer is the chosen one, unless `chosen` names its owner.
    """
    ranked = sorted(group, key=lambda rollout: -_value(rollout, config))
    firsts = [one for one in ranked if config.chosen in ("", owners[id(one)])]
    if not firsts:
        return None
    chosen = generator.choice(firsts) if config.rule == "random" else firsts[0]
    others = [one for one in ranked if one.completion.text != chosen.completion.text]
    if config.rejected:
        others = [one for one in others if owners[id(one)] == config.rejected]
    else:
        others = [one for one in others if owners[id(one)] != owners[id(chosen)]]
    if not others:
        return None
    rejected = others[-1] if config.rule == "max_min" else generator.choice(others)
    if not config.chosen and _value(rejected, config) > _value(chosen, config):
        chosen, rejected = rejected, chosen
    return Pair(chosen, rejected, _value(chosen, config) - _value(rejected, config))


def _sampled_tokens(rollout: Rollout) -> int:
    return rollout.completion.action_mask.count(1)


# ---------------------------------------------------------------- splitting and recording


def splits(rows: Sequence[T], prompt_of: Callable[[T], str], config: Selection, *, seed: int) -> dict[str, list[T]]:
    """The rows by split. DataError if nothing is left to train on."""
    found = split_by_prompt(rows, prompt_of, fraction=config.eval_fraction, seed=seed)
    if not found["train"]:
        raise DataError(
            "select",
            config.model_dump(mode="json"),
            f"keeps {len(rows)} of the rollouts, and none of them to train on",
            "lower minimum or margin_threshold, sample more per prompt, or raise sampling.max_tokens",
        )
    return found


def record_demonstrations(rollouts: Sequence[Rollout], context: StageContext) -> None:
    """Record the first selected answers as a table."""
    rows = [[one.prompt.messages[-1].content, one.completion.text, one.reward] for one in rollouts[:TABLE_ROWS]]
    context.tracker.table("samples/selected", ["prompt", "completion", "reward"], rows)


def record_pairs(pairs: Sequence[Pair], context: StageContext) -> None:
    """Record the first pairs as a table."""
    rows: list[list[Any]] = [
        [
            pair.chosen.prompt.messages[-1].content,
            pair.chosen.completion.text,
            pair.rejected.completion.text,
            pair.margin,
        ]
        for pair in pairs[:TABLE_ROWS]
    ]
    context.tracker.table("samples/pairs", ["prompt", "chosen", "rejected", "margin"], rows)


def _different(group: Group) -> Group:
    """The rollouts without later copies of the same text."""
    first: dict[str, Rollout] = {}
    for rollout in group:
        first.setdefault(rollout.completion.text, rollout)
    return list(first.values())


def _mean_reward(rollouts: Sequence[Rollout]) -> float:
    return fmean(rollout.reward for rollout in rollouts)
