"""Choose which pairs of answers are worth a judgment, and define the tables of comparisons and judgments."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import pyarrow as pa  # type: ignore[import-untyped]

from rlhf_core.data.chat import answer_message
from rlhf_core.data.shards import MESSAGES, read_rows, write_rows
from rlhf_core.data.tables import content_id
from rlhf_core.errors import DataError
from rlhf_core.types import Message, Prompt, Rollout, derive_seed

# ---------------------------------------------------------------- comparisons

COMPARISONS_FILE = "comparisons.parquet"
JUDGMENTS_FILE = "judgments.parquet"

Choice: TypeAlias = Literal["first", "second", "tie", "both_bad"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
OTHER_SIDE: dict[Choice, Choice] = {"first": "second", "second": "first", "tie": "tie", "both_bad": "both_bad"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one prompt, in the order in which annotators see them.

    The policies are recorded and never shown. A comparison that `repeats` another has its answers with the sides
    swapped, and measures whether annotators agree with themselves. A comparison with an `expected` choice measures
    attention: one of its answers belongs to another prompt. Only the others train a reward model.

    >>> Comparison("c1", (Message("user", "Hi"),), "", "world", "Hello.", "No.", "sft", "sft").trains
    True
    """

    id: str
    prompt: tuple[Message, ...]
    label: str
    source: str
    first: str
    second: str
    first_policy: str
    second_policy: str
    repeats: str = ""
    expected: str = ""

    @property
    def trains(self) -> bool:
        """Whether its judgment becomes a training pair."""
        return not self.repeats and not self.expected


@dataclass(frozen=True, slots=True)
class Judgment:
    """Choice of one annotator for one comparison. `seconds` is 0.0 if the time was not measured.

    >>> Judgment("c1", "annotator-1", "first").choice
    'first'
    """

    comparison: str
    annotator: str
    choice: Choice
    reason: str = ""
    seconds: float = 0.0


TEXT = pa.string()
COMPARISONS_SCHEMA = pa.schema(
    {"id": TEXT, "prompt": MESSAGES}
    | dict.fromkeys(
        ("label", "source", "first", "second", "first_policy", "second_policy", "repeats", "expected"), TEXT
    )
)
JUDGMENTS_SCHEMA = pa.schema(
    dict.fromkeys(("comparison", "annotator", "choice", "reason"), TEXT) | {"seconds": pa.float64()}
)


def write_comparisons(folder: Path, rows: Sequence[Comparison]) -> None:
    """Write `rows` to `folder/comparisons.parquet`."""
    write_rows(folder / COMPARISONS_FILE, COMPARISONS_SCHEMA, rows)


def read_comparisons(folder: Path) -> list[Comparison]:
    """Read the rows of `folder/comparisons.parquet`, in order."""
    return read_rows(folder / COMPARISONS_FILE, COMPARISONS_SCHEMA, Comparison)


def write_judgments(folder: Path, rows: Sequence[Judgment]) -> None:
    """Write `rows` to `folder/judgments.parquet`."""
    write_rows(folder / JUDGMENTS_FILE, JUDGMENTS_SCHEMA, rows)


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two different answers to one prompt that could be compared, with the policies that gave them."""

    first: Rollout
    second: Rollout
    policies: tuple[str, str]

    @property
    def prompt(self) -> Prompt:
        """The prompt of both answers."""
        return self.first.prompt

    @property
    def margin(self) -> float:
        """The difference of the rewards, without its sign."""
        return abs(self.first.reward - self.second.reward)

    @property
    def disagreement(self) -> float:
        """The share of pairs of reward components that rank the two answers in opposite order.

        Components that rank them equal take no side. With components that all take the same side it is 0.
        """
        ours, theirs = self.first.reward_components, self.second.reward_components
        sides = [ours[name] > theirs[name] for name in ours if name in theirs and ours[name] != theirs[name]]
        pairs = len(sides) * (len(sides) - 1) / 2  # n (n - 1) / 2 pairs of components
        return sides.count(True) * sides.count(False) / pairs if pairs else 0.0


def candidates(rollouts: Mapping[str, Sequence[Rollout]]) -> dict[str, list[Candidate]]:
    """List every pair of different answers to each prompt id, over all policies. Invalid rollouts are left out."""
    answers: dict[str, dict[str, tuple[str, Rollout]]] = {}
    for policy, rows in rollouts.items():
        for row in rows:
            if not row.invalid:
                answers.setdefault(row.prompt.id, {}).setdefault(row.completion.text, (policy, row))
    return {
        prompt: [
            Candidate(first, second, (policy, other))
            for (policy, first), (other, second) in itertools.combinations(different.values(), 2)
        ]
        for prompt, different in answers.items()
    }


def ranked_by(strategy: str, seed: int) -> Callable[[Candidate], tuple[float, int]]:
    """The sort key of a strategy: the most informative pair first; ties in an order drawn from the seed.

    `random` draws pairs, `margin` takes the pairs with the closest rewards, and `disagreement` takes the pairs on whose
    order the components of the reward disagree most.
    """

    def key(candidate: Candidate) -> tuple[float, int]:
        texts = (candidate.first.completion.text, candidate.second.completion.text)
        drawn = derive_seed(seed, "propose", candidate.prompt.id, *texts)
        value = {"random": 0.0, "margin": candidate.margin, "disagreement": -candidate.disagreement}[strategy]
        return value, drawn

    return key


def chosen(
    by_prompt: dict[str, list[Candidate]], *, strategy: str, budget: int, per_prompt: int, seed: int
) -> list[Candidate]:
    """Choose at most `budget` pairs, the most informative of all prompts first, at most `per_prompt` of each prompt.

    The second pair of a prompt is taken only after the first of every prompt, so that the budget covers the prompts.
    """
    key = ranked_by(strategy, seed)
    rounds: list[list[Candidate]] = [[] for _ in range(per_prompt)]
    for pairs in by_prompt.values():
        for place, pair in enumerate(sorted(pairs, key=key)[:per_prompt]):
            rounds[place].append(pair)
    return [pair for one in rounds for pair in sorted(one, key=key)][:budget]


def comparisons(
    pairs: Sequence[Candidate], *, repeat_fraction: float, attention_fraction: float, seed: int
) -> list[Comparison]:
    """Turn the pairs into comparisons in random order with random sides, and add checks of the annotators.

    `repeat_fraction` of them are shown a second time with the sides swapped. Attention checks, `attention_fraction` of
    them in number, show an answer next to the answer to another prompt.
    """
    rng = random.Random(derive_seed(seed, "sides"))
    rows_by_id = {one.id: one for one in (_comparison(pair, swap=rng.random() < 0.5) for pair in pairs)}
    asked = list(rows_by_id.values())  # two prompts may have the same text
    again = [_again(one) for one in rng.sample(asked, round(repeat_fraction * len(asked)))]
    checks = _attention_checks(pairs, round(attention_fraction * len(asked)), rng)
    rows = [*asked, *again, *checks]
    rng.shuffle(rows)
    return rows


def require_components(rollouts: Mapping[str, Sequence[Rollout]]) -> None:
    """Raise DataError unless the rewards have two components, which `disagreement` needs."""
    most = max((len(row.reward_components) for rows in rollouts.values() for row in rows), default=0)
    if most < 2:
        rule = f"compares the components of the reward, and the rollouts have {most}"
        raise DataError("strategy", "disagreement", rule, "score with two terms or more, or take margin")


def _comparison(pair: Candidate, *, swap: bool) -> Comparison:
    sides = [(answer_message(row).content, policy) for row, policy in zip((pair.first, pair.second), pair.policies)]
    (first, first_policy), (second, second_policy) = reversed(sides) if swap else sides
    prompt = pair.prompt
    return Comparison(
        id=content_id("comparison", prompt.messages, first, second),
        prompt=prompt.messages,
        label=prompt.label,
        source=prompt.source,
        first=first,
        second=second,
        first_policy=first_policy,
        second_policy=second_policy,
    )


def _again(one: Comparison) -> Comparison:
    swapped = replace(one, first=one.second, second=one.first, repeats=one.id, id=f"{one.id}-again")
    return replace(swapped, first_policy=one.second_policy, second_policy=one.first_policy)


def _attention_checks(pairs: Sequence[Candidate], count: int, rng: random.Random) -> list[Comparison]:
    """At most `count` comparisons of an answer with the answer to another prompt, which must lose."""
    checks: list[Comparison] = []
    for number in range(count):
        own = rng.choice(pairs)
        answers = {own.first.completion.text, own.second.completion.text}
        others = [
            pair.second
            for pair in pairs
            if pair.prompt.messages != own.prompt.messages and pair.second.completion.text not in answers
        ]
        if not others:  # replies that fit every prompt discriminate nothing
            continue
        misplaced = replace(rng.choice(others), prompt=own.prompt)
        pair = Candidate(own.first, misplaced, (own.policies[0], "another prompt"))
        one = _comparison(pair, swap=rng.random() < 0.5)
        right = "second" if one.first_policy == "another prompt" else "first"
        checks.append(replace(one, expected=right, id=f"{one.id}-check-{number}"))
    return checks
