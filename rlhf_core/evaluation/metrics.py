"""Compute statistics of texts, tokens and scores, the distance of answers to a reference, and calibration.

A reward model is calibrated by a temperature, fitted on the pairs of one half of the prompts and judged on the pairs of
the other half. In a Bradley-Terry model P(chosen is better) = sigmoid(margin / T). T = 1 is the unchanged model; an
overconfident model has T > 1 (temperature scaling, Guo et al., arXiv 1706.04599).
"""

import math
import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.evaluation.intervals import LEVEL
from rlhf_core.sequences import Sequences
from rlhf_core.stage.context import StageContext
from rlhf_core.types import Generation, PolicyRef


class ReliabilityBin(NamedTuple):
    """The predictions in one bin of confidence, with their mean probability and how often they were right."""

    low: float
    high: float
    pairs: int
    confidence: float
    accuracy: float


def distinct_n(sequences: Sequence[Sequence[Hashable]], n: int) -> float:
    """Distinct n-grams over all n-grams of all sequences (arXiv 1510.03055), or 0.0 without n-grams.

    >>> distinct_n([["a", "b", "a", "b"]], 2)  # ab, ba, ab
    0.6666666666666666
    """
    grams = [tuple(sequence[i : i + n]) for sequence in sequences for i in range(len(sequence) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition(sequence: Sequence[Hashable], n: int) -> float:
    """The fraction of n-grams of a sequence that occurred in it before, or 0.0 without n-grams.

    >>> repetition(["a", "b", "a", "b"], 2)
    0.33333333333333337
    """
    grams = [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def entropy_estimate(logprobs: Sequence[Sequence[float]]) -> float:
    """Estimate the entropy per token as -mean log p(sampled token) over all tokens, in nats, without bias."""
    tokens = sum(len(sequence) for sequence in logprobs)
    return -math.fsum(value for sequence in logprobs for value in sequence) / tokens if tokens else 0.0


def best_of_n_kl(n: int) -> float:
    """log n - (n - 1) / n, an upper bound of KL(best-of-n || policy) in nats (arXiv 2009.01325, 2401.01879).

    >>> best_of_n_kl(1)
    0.0
    """
    return math.log(n) - (n - 1) / n


def correlation(xs: Sequence[float] | np.ndarray, ys: Sequence[float] | np.ndarray) -> float:
    """Pearson's correlation, or 0.0 if one side does not vary."""
    x, y = np.asarray(xs, dtype=np.float64), np.asarray(ys, dtype=np.float64)
    if x.size < 2 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])  # cov(x, y) / (sd(x) sd(y))


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's correlation, in which ties share their mean rank."""
    return correlation(_ranks(xs), _ranks(ys))


def reliability(
    probabilities: Sequence[float] | np.ndarray, outcomes: Sequence[float] | np.ndarray, *, bins: int
) -> list[ReliabilityBin]:
    """Sort predictions into bins of equal width over [0, 1]; empty bins are left out.

    ¶ Bin i is [i/bins, (i+1)/bins), and the last is closed. `outcomes` are 1.0 for predictions that came true, 0.0 for
    false ones, and 0.5 for undecided ones (ties).

    `outcomes` are 1.0 for predictions that came true, 0.0 for those that did not, and 0.5 for undecided ones (ties).
    """
    p = np.asarray(probabilities, dtype=np.float64)
    y = np.asarray(outcomes, dtype=np.float64)
    index = np.minimum((p * bins).astype(int), bins - 1)  # 1.0 is in the last bin
    return [
        ReliabilityBin(i / bins, (i + 1) / bins, int(inside.sum()), float(p[inside].mean()), float(y[inside].mean()))
        for i, inside in ((i, index == i) for i in range(bins))
        if inside.any()
    ]


def calibration_error(rows: Sequence[ReliabilityBin]) -> float:
    """Expected calibration error: mean of |accuracy - confidence| over bins, weighted by their counts."""
    total = sum(row.pairs for row in rows)
    return sum(row.pairs * abs(row.accuracy - row.confidence) for row in rows) / total if total else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[place]  # ties share the mean of their ranks, counted from 0


# ---------------------------------------------------------------- distance

KL_BATCH = 256  # number of answers per call of the reference, so that progress can be reported


def log_ratios(
    ref: PolicyRef | None,
    rows: Mapping[str, Sequence[Generation]],
    sampling: Mapping[str, SamplingConfig],
    context: StageContext,
) -> dict[str, tuple[float, ...]]:
    """log mu(y) - log ref(y) of each answer y by policy, in nats, where mu is the sampler's distribution.

    For an episode it is the sum over the tokens that the policy sampled. The environment's tokens are given to both.

    The result is empty without a reference, and has no greedy or filtered answers. Greedy answers are not samples of a
    distribution, and top_p, top_k, min_p and penalties change mu, but not the reference.
    """
    if ref is None:
        return dict.fromkeys(rows, ())
    ratios: dict[str, tuple[float, ...]] = {}
    total, done = sum(len(items) for items in rows.values()), 0
    model = context.model(ref)
    with context.runtime.trainer("reference", model, None) as trainer:
        for name, items in rows.items():
            values: list[float] = []
            temperature = sampling[name].temperature
            for start in range(0, len(items) if _comparable(sampling[name]) else 0, KL_BATCH):
                piece = items[start : start + KL_BATCH]
                tokens = Sequences.of_answers(piece)
                logprobs = tokens.split(trainer.logprobs(tokens, temperature=temperature))
                values += [_log_ratio(item, row.tolist()) for item, row in zip(piece, logprobs, strict=True)]
                text = f"log-probabilities of the answers of {name} under the reference"
                context.progress(done + len(values), total, text)
            ratios[name] = tuple(values)
            done += len(items)
    return ratios


def _comparable(sampling: SamplingConfig) -> bool:
    return sampling.temperature > 0 and not sampling.reshapes


def _log_ratio(generation: Generation, ref_logprobs: Sequence[float]) -> float:
    return math.fsum(generation.completion.logprobs) - math.fsum(ref_logprobs[len(generation.prompt_ids) :])


# ---------------------------------------------------------------- calibration

RESAMPLES = 1000  # bootstrap draws: 25 beyond either end of a 95 % interval
BINS = 20  # number of bins over [0, 1]; the probability of the higher-scored answer is in the upper half of them
FEWEST = 10  # fewest prompts in a half; with fewer, nothing is fitted
SHARPEST, FLATTEST = 1e-2, 1e3
"""Bounds of the temperature. A model that orders every pair right has no best temperature: sharper is always better."""


def calibration_report(margins: Sequence[float], *, prompts: Sequence[Hashable], seed: int) -> dict[str, Any] | None:
    """Fit the temperature, and measure the calibration error before and after it on the other half of the prompts.

    `margins` are the scores of chosen answers minus the scores of rejected ones, and `prompts` names the prompt of
    each: pairs of one prompt are alike, so they are in one half, and are resampled together. Errors have bootstrap
    intervals, and so has their difference, `ece_change`: below 0 the temperature helps. The result is None for fewer
    than 2 * `FEWEST` prompts.
    """
    order = list(dict.fromkeys(prompts))
    random.Random(seed).shuffle(order)
    half = len(order) // 2
    if half < FEWEST:
        return None
    place = {name: at for at, name in enumerate(order)}
    index = np.array([place[name] for name in prompts])
    values = np.asarray(margins, dtype=np.float64)
    fitted, others = values[index < half], values[index >= half]
    temperature = fit_temperature(fitted.tolist())
    before, after = (calibration_error(confidence_bins(others / t)) for t in (1.0, temperature))
    count = len(order) - half
    counts_RC = np.random.default_rng(seed).multinomial(count, [1 / count] * count, size=RESAMPLES)
    drawn = [_resampled_ece(others / t, index[index >= half] - half, counts_RC) for t in (1.0, temperature)]
    return {
        "temperature": temperature,
        "at_bound": not SHARPEST * 1.01 < temperature < FLATTEST / 1.01,
        "fitted_pairs": int(fitted.size),
        "pairs": int(others.size),
        "prompts": count,
        "ece_before": _interval(before, drawn[0]),
        "ece_after": _interval(after, drawn[1]),
        "ece_change": _interval(after - before, drawn[1] - drawn[0]),
        "reliability_after": [row._asdict() for row in confidence_bins(others / temperature)],
    }


def fit_temperature(margins: Sequence[float]) -> float:
    """The T that minimizes the mean of -log sigmoid(margin / T), between `SHARPEST` and `FLATTEST`.

    >>> round(fit_temperature([2.0, 2.0, 2.0, -2.0]), 3)  # three of four are right: sigmoid(2 / T) = 3/4
    1.82
    """
    values = np.asarray(margins, dtype=np.float64)
    if values.min() >= 0 or values.max() <= 0:  # a bound is best, and the loss may be flat before it
        return SHARPEST if values.min() >= 0 else FLATTEST
    from scipy.optimize import minimize_scalar  # half a second

    # In the logarithm of T, because it is a scale; the loss is convex in 1 / T, so it has one minimum.
    found = minimize_scalar(
        lambda log: float(np.logaddexp(0.0, -values * np.exp(-log)).mean()),
        bounds=(float(np.log(SHARPEST)), float(np.log(FLATTEST))),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(np.exp(found.x))


def confidence_bins(margins: Sequence[float] | np.ndarray) -> list[ReliabilityBin]:
    """Bins over [0.5, 1] of sigmoid(|margin|) = P(the higher-scored answer is the chosen one). Ties count half."""
    return reliability(*_confidence(margins), bins=BINS)


def _confidence(margins: Sequence[float] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The probability that the higher-scored answer is the chosen one, and whether it is (ties half)."""
    values = np.asarray(margins, dtype=np.float64)
    return 1 / (1 + np.exp(-np.minimum(np.abs(values), 700.0))), (np.sign(values) + 1) / 2  # exp overflows at 710


def _resampled_ece(margins: np.ndarray, prompt: np.ndarray, counts_RC: np.ndarray) -> np.ndarray:
    """The calibration error of R resamples, each of which weights the pairs of C prompts by its counts.

    A bin adds |sum of outcomes - sum of confidences|, divided by the number of all pairs: the definition of
    `calibration_error`, without a loop over resamples.
    """
    sure, outcome = _confidence(margins)
    gap_CB = np.zeros((counts_RC.shape[1], BINS))
    np.add.at(gap_CB, (prompt, np.minimum((sure * BINS).astype(int), BINS - 1)), outcome - sure)
    return np.abs(counts_RC @ gap_CB).sum(axis=1) / (counts_RC @ np.bincount(prompt, minlength=counts_RC.shape[1]))


def _interval(value: float, drawn: np.ndarray) -> dict[str, float]:
    low, high = (float(np.quantile(drawn, side)) for side in ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return {"value": float(value), "low": low, "high": high}
