"""Evaluate a reward model: accuracy with intervals, calibration, dependence on length, margins."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from rlhf_core.evaluation import plots
from rlhf_core.evaluation.calibration import calibration_report, confidence_bins
from rlhf_core.evaluation.intervals import DIFFERENCE_OF_SHARES, SHARE, mean_interval
from rlhf_core.evaluation.metrics import calibration_error, correlation, rank_correlation


def reward_model_report(
    *,
    chosen_scores: Sequence[float],
    rejected_scores: Sequence[float],
    chosen_lengths: Sequence[int],
    rejected_lengths: Sequence[int],
    sources: Sequence[str],
    prompts: Sequence[Hashable],
    seed: int,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the report (JSON-compatible) and its figures (name -> PNG). Arguments have one entry per held-out pair.

    `accuracy` counts ties half; its interval counts the pairs of one prompt, which are alike, as one. `ece` is the calibration error of sigmoid(|score difference|) as the probability that
    the answer with the higher score is the chosen one. `slices` divides the pairs by source, and by which answer is
    longer: a model that prefers length is right only where the chosen answer is longer. `calibration` is that of
    `calibration_report`, None for few pairs.
    """
    margins = [a - b for a, b in zip(chosen_scores, rejected_scores, strict=True)]
    gaps = [a - b for a, b in zip(chosen_lengths, rejected_lengths, strict=True)]
    hits = hits_of(chosen_scores, rejected_scores)
    rows = confidence_bins(margins)
    scores, lengths = [*chosen_scores, *rejected_scores], [*chosen_lengths, *rejected_lengths]
    ece = calibration_error(rows)
    overall = _accuracy(hits, prompts)
    report = {
        "pairs": len(margins),
        "prompts": overall["prompts"],
        "accuracy": overall["accuracy"],
        "accuracy_low": overall["low"],
        "accuracy_high": overall["high"],
        "ece": ece,
        "length_correlation": correlation(lengths, scores),
        "length_rank_correlation": rank_correlation(lengths, scores),
        "margin_length_correlation": correlation(gaps, margins),
        "margin_mean": math.fsum(margins) / len(margins),
        "margin_std": _std(margins),
        "score_mean": math.fsum(scores) / len(scores),
        "score_std": _std(scores),
        "reliability": [row._asdict() for row in rows],
        "calibration": calibration_report(margins, prompts=prompts, seed=seed),
        "slices": {
            name: _accuracy([hits[i] for i in places], [prompts[i] for i in places])
            for name, places in _slices(sources, gaps).items()
            if places
        },
    }
    figures = {
        "reliability": plots.reliability_diagram(rows, ece=ece),
        "margins": plots.margin_histogram(
            margins, title=f"{overall['accuracy']:.1%} of {len(margins)} pairs ordered right"
        ),
        "length": plots.length_scatter(
            {"chosen": (chosen_lengths, chosen_scores), "rejected": (rejected_lengths, rejected_scores)},
            x_label="tokens",
            y_label="score",
        ),
    }
    return report, figures


def hits_of(chosen_scores: Sequence[float], rejected_scores: Sequence[float]) -> list[float]:
    """Return for each pair whether it is ordered right: 1, 0, or 0.5 for a tie."""
    pairs = zip(chosen_scores, rejected_scores, strict=True)
    return [1.0 if chosen > rejected else 0.5 if chosen == rejected else 0.0 for chosen, rejected in pairs]


def accuracy_difference(
    ours: Sequence[float], theirs: Sequence[float], prompts: Sequence[Hashable]
) -> dict[str, float]:
    """Return the difference of two accuracies on the same pairs, from the hits of both, with its paired interval."""
    apart = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    return mean_interval(apart, prompts=prompts, bounds=DIFFERENCE_OF_SHARES).plain()


def _slices(sources: Sequence[str], gaps: Sequence[int]) -> dict[str, list[int]]:
    slices = {f"source: {name}": [i for i, item in enumerate(sources) if item == name] for name in sorted(set(sources))}
    slices["chosen is longer"] = [i for i, gap in enumerate(gaps) if gap > 0]
    slices["chosen is shorter"] = [i for i, gap in enumerate(gaps) if gap < 0]
    slices["same length"] = [i for i, gap in enumerate(gaps) if gap == 0]
    return slices


def _accuracy(hits: Sequence[float], prompts: Sequence[Hashable]) -> dict[str, float]:
    found = mean_interval(hits, prompts=prompts, bounds=SHARE)
    named = {"accuracy": found.mean, "low": found.low, "high": found.high}
    return named | {"pairs": len(hits), "prompts": found.prompts}


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
