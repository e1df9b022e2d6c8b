"""Evaluate a process reward model: accuracy over steps, detection of the first error, calibration."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

from rlhf_core.evaluation import plots
from rlhf_core.evaluation.intervals import SHARE, mean_interval
from rlhf_core.evaluation.metrics import calibration_error, reliability

BINS = 10
THRESHOLD = 0.5
"""A step with a probability (or label) below this is wrong."""


def step_report(
    *, logits: Sequence[Sequence[float]], labels: Sequence[Sequence[float]], prompts: Sequence[Hashable]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the report (JSON-compatible) and its figures (name -> PNG). Arguments have one entry per held-out answer.

    `prompts` names the prompt of each answer, the unit of the intervals. `accuracy` is over steps. `first_error_accuracy` is over answers: the first step judged wrong is the first wrong
    step, or there is neither. `f1` is the harmonic mean of that accuracy over answers with an error and over those
    without (ProcessBench, arXiv 2412.06559). `ece` is the calibration error of the steps' probabilities.
    """
    probabilities = [[_sigmoid(logit) for logit in row] for row in logits]
    pairs = [
        (probability, label)
        for row, judged in zip(probabilities, labels, strict=True)
        for probability, label in zip(row, judged, strict=True)
    ]
    hits = [float(_wrong(probability) == _wrong(label)) for probability, label in pairs]
    found = [
        (first_error(judged), float(first_error(row) == first_error(judged)))
        for row, judged in zip(probabilities, labels, strict=True)
    ]
    with_error = [hit for error, hit in found if error is not None]
    without = [hit for error, hit in found if error is None]
    rows = reliability([probability for probability, _ in pairs], [label for _, label in pairs], bins=BINS)
    of_steps = [prompt for prompt, row in zip(prompts, logits, strict=True) for _ in row]
    steps = mean_interval(hits, prompts=of_steps, bounds=SHARE)
    answers = mean_interval([hit for _, hit in found], prompts=prompts, bounds=SHARE)
    ece = calibration_error(rows)
    report = {
        "answers": len(found),
        "prompts": answers.prompts,
        "steps": len(pairs),
        "right_steps": sum(not _wrong(label) for _, label in pairs),
        "accuracy": steps.mean,
        "accuracy_low": steps.low,
        "accuracy_high": steps.high,
        "first_error_accuracy": answers.mean,
        "first_error_accuracy_low": answers.low,
        "first_error_accuracy_high": answers.high,
        "first_error_accuracy_with_error": _mean(with_error),
        "first_error_accuracy_without_error": _mean(without),
        "f1": _harmonic(_mean(with_error), _mean(without)),
        "ece": ece,
        "reliability": [row._asdict() for row in rows],
    }
    return report, {"reliability": plots.reliability_diagram(rows, ece=ece)}


def first_error(probabilities: Sequence[float]) -> int | None:
    """Return the first step (from 0) that is more likely wrong than right, or None if there is none.

    >>> first_error([0.9, 0.3, 0.1]), first_error([0.9])
    (1, None)
    """
    return next((step for step, probability in enumerate(probabilities) if _wrong(probability)), None)


def _wrong(probability: float) -> bool:
    return probability < THRESHOLD


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-max(min(logit, 700.0), -700.0)))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _harmonic(left: float | None, right: float | None) -> float | None:
    if left is None or right is None:
        return None
    return 2 * left * right / (left + right) if left + right else 0.0
