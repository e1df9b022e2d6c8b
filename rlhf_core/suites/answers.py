"""Turn the answers of a policy, with a value each, into the rows of a suite: one per prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from rlhf_core.errors import DataError, explain
from rlhf_core.rewards.protocols import prompt_text
from rlhf_core.suites.results import NO_WEIGHTS, Row
from rlhf_core.types import Generation


def by_prompt(generations: Sequence[Generation]) -> list[list[int]]:
    """Return the positions of the answers of each prompt, with prompts in the order of first appearance."""
    places: dict[str, list[int]] = {}
    for place, one in enumerate(generations):
        places.setdefault(one.prompt.id, []).append(place)
    return list(places.values())


def row_of(first: Generation, values: Mapping[str, float], weights: Mapping[str, float] = NO_WEIGHTS) -> Row:
    """Return the row of a prompt; `first` is the first answer to it."""
    prompt = first.prompt
    text = prompt_text(prompt.messages)
    return Row(prompt.id, prompt.source, text, first.completion.text, dict(values), dict(weights))


def mean_rows(generations: Sequence[Generation], values: Sequence[float | None], measure: str) -> list[Row]:
    """Return a row per prompt with the mean of its answers' values; prompts without any value are left out."""
    rows = []
    for places in by_prompt(generations):
        found = [value for place in places if (value := values[place]) is not None]
        if found:
            rows.append(row_of(generations[places[0]], {measure: fmean(found)}))
    return rows


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def check_counts(generations: Sequence[Generation], ks: Sequence[int]) -> None:
    """Raise DataError for a prompt with fewer answers than the largest k."""
    for places in by_prompt(generations):
        if len(places) < max(ks):
            rule = f"the prompt {generations[places[0]].prompt.id} has only {len(places)} answers"
            remedy = "raise generate.samples_per_prompt of the suite, or leave out this k"
            raise DataError(explain("evaluate.suites.k", max(ks), rule, remedy))


def pass_at_k_rows(
    generations: Sequence[Generation], values: Sequence[float | None], ks: Sequence[int], *, threshold: float
) -> list[Row]:
    """Return a row per prompt with `pass_at_<k>`; an answer is right if its value is at least `threshold`.

    Prompts without a value are left out. Raises DataError for a prompt at which only some answers have a value.
    """
    rows = []
    for places in by_prompt(generations):
        found = [value for place in places if (value := values[place]) is not None]
        if not found:
            continue
        if len(found) < len(places):
            rule = f"gives a value for only {len(found)} of {len(places)} answers to {generations[places[0]].prompt.id}"
            remedy = "return None for all answers to a prompt or for none, and 0.0 for a wrong one"
            raise DataError(explain("evaluate.suites.function", len(found), rule, remedy))
        correct = sum(value >= threshold for value in found)
        values_of = {f"pass_at_{k}": pass_at_k(len(found), correct, k) for k in ks}
        rows.append(row_of(generations[places[0]], values_of))
    return rows
