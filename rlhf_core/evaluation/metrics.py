"""Compute statistics of texts, tokens and scores, from plain numbers to plain numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np


class ReliabilityBin(NamedTuple):
    """The predictions in one bin of confidence, with their mean probability and how often they were right."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


def distinct_n(sequences: Sequence[Sequence[Hashable]], n: int) -> float:
    """Return distinct n-grams over all n-grams of all sequences (arXiv 1510.03055), or 0.0 if there are no n-grams.

    >>> distinct_n([["a", "b", "a", "b"]], 2)  # ab, ba, ab
    0.6666666666666666
    """
    grams = [tuple(sequence[i : i + n]) for sequence in sequences for i in range(len(sequence) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(sequence: Sequence[Hashable], n: int) -> float:
    """Return the fraction of n-grams of a sequence that occurred in it before, or 0.0 if there are no n-grams.

    >>> repetition(["a", "b", "a", "b"], 2)
    0.33333333333333337
    """
    grams = [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def entropy_estimate(logprobs: Sequence[Sequence[float]]) -> float:
    """Return -mean log p(sampled token) over all tokens, in nats: an unbiased estimate of the entropy per token."""
    tokens = sum(len(sequence) for sequence in logprobs)
    return -math.fsum(value for sequence in logprobs for value in sequence) / tokens if tokens else 0.0


def best_of_n_kl(n: int) -> float:
    """Return log n - (n - 1) / n, an upper bound of KL(best-of-n || policy) in nats (arXiv 2009.01325, 2401.01879).

    >>> best_of_n_kl(1)
    0.0
    """
    return math.log(n) - (n - 1) / n


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Pearson's correlation, or 0.0 if one side does not vary."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.size < 2 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Spearman's correlation, in which ties share their mean rank."""
    return correlation(_ranks(xs), _ranks(ys))


def reliability(probabilities: Sequence[float], outcomes: Sequence[float], *, bins: int) -> list[ReliabilityBin]:
    """Return the non-empty bins of equal width over [0, 1]. Bin i is [i/bins, (i+1)/bins), and the last is closed.

    `outcomes` are 1.0 for predictions that came true, 0.0 for those that did not, and 0.5 for undecided ones (ties).
    """
    p = np.asarray(probabilities, dtype=np.float64)
    y = np.asarray(outcomes, dtype=np.float64)
    index = np.minimum((p * bins).astype(int), bins - 1)
    rows = []
    for i in range(bins):
        inside = index == i
        if inside.any():
            row = (i / bins, (i + 1) / bins, int(inside.sum()), float(p[inside].mean()), float(y[inside].mean()))
            rows.append(ReliabilityBin(*row))
    return rows


def calibration_error(rows: Sequence[ReliabilityBin]) -> float:
    """Return the expected calibration error: mean of |accuracy - confidence| over bins, weighted by their counts."""
    total = sum(row.pairs for row in rows)
    return sum(row.pairs * abs(row.accuracy - row.confidence) for row in rows) / total if total else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in range(start, end + 1):
            ranks[order[position]] = (start + end) / 2
        start = end + 1
    return ranks
