"""Measure how far judgments can be trusted: agreement, self-consistency, position bias, attention."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rlhf_core.annotation.proposing import OTHER_SIDE, Comparison, Judgment
from rlhf_core.evaluation.intervals import SHARE, mean_interval


def judgment_report(
    comparisons: Sequence[Comparison], judgments: Sequence[Judgment], *, gold: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Measure how far the judgments can be trusted, as JSON values; None for a measure without data.

    `agreement` is the share of pairs of annotators with the same choice, over the comparisons that several judged, and
    `alpha` Krippendorff's alpha for nominal data, which corrects for agreement by chance. `first_chosen` is the share
    of the first side among choices of a side: 0.5 without position bias, because sides are random. `consistency` is the
    share of repeated comparisons that an annotator judged alike with the sides swapped. `attention` is the share of
    attention checks that were passed. `gold` maps a comparison to the known reward of the first side minus the second
    side's. The report's `gold` is the share of choices of the side with the higher reward, where the rewards differ.
    Shares have confidence intervals over prompts.
    """
    gold = {} if gold is None else gold
    by_id = {one.id: one for one in comparisons}
    rows = [(by_id[one.comparison], one) for one in judgments]
    training = [(asked, said) for asked, said in rows if asked.trains]
    return {
        "judgments": len(rows),
        "comparisons": len({asked.id for asked, _ in training}),
        "choices": dict(Counter(said.choice for _, said in training)),
        "agreement": share(_agreements(training)),
        "alpha": krippendorff_alpha(_units(training).values()),
        "first_chosen": share(_first_chosen([row for row in rows if not row[0].expected])),
        "consistency": share(_repeated_alike(rows)),
        "attention": share(_attention(rows)),
        "gold": share(_as_gold(training, gold)),
        "annotators": {
            name: {
                "judgments": len(theirs),
                "consistency": _mean(_repeated_alike(theirs)),
                "attention": _mean(_attention(theirs)),
                "gold": _mean(_as_gold([row for row in theirs if row[0].trains], gold)),
                "first_chosen": _mean(_first_chosen([row for row in theirs if not row[0].expected])),
                "median_seconds": median(said.seconds for _, said in theirs),
            }
            for name, theirs in _by_annotator(rows).items()
        },
    }


def krippendorff_alpha(units: Any) -> float | None:
    """Krippendorff's alpha for nominal data, 1 - observed / expected disagreement; None without overlap.

    `units` holds for each item the values that its judges gave it; items with one value count for nothing. If all
    values are the same, the expected disagreement is 0 and alpha is 1. Krippendorff 2011, "Computing Krippendorff's
    alpha-reliability", section C.

    >>> krippendorff_alpha([["a", "a"], ["b", "b"], ["a", "b"]])
    0.4444444444444444
    """
    coincidences: Counter[tuple[Any, Any]] = Counter()
    for values in units:
        if len(values) > 1:
            for pair in itertools.permutations(values, 2):
                coincidences[pair] += 1 / (len(values) - 1)  # type: ignore[assignment]
    totals: Counter[Any] = Counter()
    for (value, _), count in coincidences.items():
        totals[value] += count
    n = sum(totals.values())  # number of values that can be paired
    if not n:
        return None
    observed = sum(count for (one, other), count in coincidences.items() if one != other)  # n D_o
    expected = sum(totals[one] * totals[other] for one, other in itertools.permutations(totals, 2)) / (n - 1)
    return 1.0 - observed / expected if expected else 1.0  # 1 - D_o / D_e


Row = tuple[Comparison, Judgment]
Found = list[tuple[Hashable, float]]  # values with their prompts


def _units(rows: Sequence[Row]) -> Mapping[str, list[str]]:
    """Map each comparison to the choices of its annotators."""
    units: defaultdict[str, list[str]] = defaultdict(list)
    for asked, said in rows:
        units[asked.id].append(said.choice)
    return units


def _agreements(rows: Sequence[Row]) -> Found:
    """For each comparison with several annotators, the share of annotator pairs that agree."""
    prompts = {asked.id: asked.prompt for asked, _ in rows}
    return [
        (prompts[name], fmean(float(one == other) for one, other in itertools.combinations(choices, 2)))
        for name, choices in _units(rows).items()
        if len(choices) > 1
    ]


def _first_chosen(rows: Sequence[Row]) -> Found:
    return [(asked.prompt, float(said.choice == "first")) for asked, said in rows if said.choice in ("first", "second")]


def _repeated_alike(rows: Sequence[Row]) -> Found:
    """1 or 0 for each repeated comparison of which an annotator judged both sides, swapped back."""
    said = {(one.id, judgment.annotator): judgment.choice for one, judgment in rows}
    return [
        (one.prompt, float(OTHER_SIDE[judgment.choice] == said[one.repeats, judgment.annotator]))
        for one, judgment in rows
        if one.repeats and (one.repeats, judgment.annotator) in said
    ]


def _attention(rows: Sequence[Row]) -> Found:
    return [(asked.prompt, float(said.choice == asked.expected)) for asked, said in rows if asked.expected]


def _as_gold(rows: Sequence[Row], gold: Mapping[str, float]) -> Found:
    return [
        (asked.prompt, float((said.choice == "first") == (gold[asked.id] > 0)))
        for asked, said in rows
        if said.choice in ("first", "second") and gold.get(asked.id, 0.0) != 0.0
    ]


def _by_annotator(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for asked, said in rows:
        found[said.annotator].append((asked, said))
    return dict(sorted(found.items()))


def share(found: Sequence[tuple[Hashable, float]]) -> dict[str, float] | None:
    """The mean of zeros and ones, each with its prompt, with its confidence interval over prompts; None if empty."""
    if not found:
        return None
    interval = mean_interval([value for _, value in found], prompts=[prompt for prompt, _ in found], bounds=SHARE)
    return interval.plain() | {"count": len(found)}


def _mean(found: Sequence[tuple[Hashable, float]]) -> float | None:
    return fmean(value for _, value in found) if found else None
