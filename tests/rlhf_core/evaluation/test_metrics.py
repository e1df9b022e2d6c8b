"""Statistics against numbers worked out by hand, calibration, and log-ratios to a constant reference."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.evaluation import metrics
from rlhf_core.evaluation.metrics import (
    FEWEST,
    FLATTEST,
    SHARPEST,
    best_of_n_kl,
    calibration_error,
    calibration_report,
    correlation,
    distinct_n,
    entropy_estimate,
    fit_temperature,
    rank_correlation,
    reliability,
    repetition,
)
from rlhf_core.interfaces import ModelSpec
from rlhf_core.sequences import Sequences
from rlhf_core.types import ActionSpan, Completion, Generation, Message, PolicyRef, Prompt

# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("found", "value"),
    [
        (distinct_n(["abc", "abd"], 2), 0.75),  # ab bc | ab bd: three different of four
        (distinct_n(["a"], 2), 0.0),
        (repetition("abcabc", 3), 0.25),  # abc bca cab abc: one of four came before
        (repetition("abcd", 3), 0.0),
        (repetition("ab", 3), 0.0),
        (entropy_estimate([[math.log(0.5)] * 3, [math.log(0.5)]]), math.log(2)),  # a fair coin
        (entropy_estimate([[]]), 0.0),
        (entropy_estimate([[-1.0, -1.0, -1.0], [-5.0]]), 2.0),  # tokens count, not sequences
        (best_of_n_kl(1), 0.0),
        (best_of_n_kl(8), 1.2044415),  # ln 8 - 7/8
        (correlation([1, 2, 3], [2, 4, 6]), 1.0),
        (correlation([1, 2, 3], [3, 2, 1]), -1.0),
        (correlation([1, 2, 3], [5, 5, 5]), 0.0),
        (rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]), 1.0),
        # ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5 / sqrt(4.5 * 5)
        (rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]), 4.5 / math.sqrt(4.5 * 5)),
    ],
)
def test_statistics_by_hand(found, value):
    assert found == pytest.approx(value)


def test_bins_hold_confidence_and_accuracy():
    rows = reliability([0.1, 0.15, 0.9, 1.0], [0.0, 1.0, 1.0, 1.0], bins=5)
    assert rows == [(0.0, 0.2, 2, 0.125, 0.5), (0.8, 1.0, 2, 0.95, 1.0)]
    # (2 * |0.5 - 0.125| + 2 * |1 - 0.95|) / 4
    assert calibration_error(rows) == pytest.approx(0.2125)
    assert calibration_error(reliability([0.75] * 4, [1.0, 1.0, 1.0, 0.0], bins=10)) == 0.0
    assert calibration_error([]) == 0.0


# ---------------------------------------------------------------- calibration


def drawn_margins(count: int, *, scale: float, seed: int = 3) -> list[float]:
    """Return margins of pairs whose labels follow Bradley-Terry, multiplied by `scale`."""
    rng = random.Random(seed)
    true = [rng.gauss(0, 1.5) for _ in range(count)]
    signs = [1 if rng.random() < 1 / (1 + math.exp(-abs(margin))) else -1 for margin in true]
    return [scale * abs(margin) * sign for margin, sign in zip(true, signs, strict=True)]


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_temperature_is_the_scale_by_which_the_scores_are_wrong(scale):
    assert fit_temperature(drawn_margins(20000, scale=scale)) == pytest.approx(scale, rel=0.05)


def test_a_model_that_is_too_sure_is_calibrated_on_pairs_that_were_not_fitted():
    report = calibration_report(drawn_margins(4000, scale=4.0), prompts=range(4000), seed=1)
    assert report["fitted_pairs"] == report["pairs"] == 2000 and not report["at_bound"]
    assert report["temperature"] == pytest.approx(4.0, rel=0.15)
    assert report["ece_before"]["low"] > 0.1 > 0.05 > report["ece_after"]["value"]
    assert report["ece_change"]["high"] < 0
    assert report["ece_change"]["value"] == pytest.approx(report["ece_after"]["value"] - report["ece_before"]["value"])
    json.dumps(report, allow_nan=False)


def test_pairs_that_are_all_right_have_no_best_temperature_and_the_report_says_so():
    for margin, best in ((1.0, SHARPEST), (1000.0, SHARPEST), (-1.0, FLATTEST)):  # at 1000 the loss is 0 long before
        report = calibration_report([margin] * 40, prompts=range(40), seed=1)
        assert report is not None and report["at_bound"]
        assert report["temperature"] == best


def test_too_few_pairs_fit_nothing():
    for prompts, fitted in ((2 * FEWEST - 1, False), (2 * FEWEST, True)):
        report = calibration_report([1.0, -1.0] * prompts, prompts=[*range(prompts)] * 2, seed=1)
        assert (report is not None) is fitted  # pairs of one prompt are no more


def test_pairs_of_a_prompt_are_in_one_half_and_are_resampled_together():
    """Ten times the same pairs say no more than once: the same temperature, error and interval, but for the draws."""
    margins = drawn_margins(300, scale=3.0)
    once = calibration_report(margins, prompts=range(300), seed=1)
    often = calibration_report(margins * 10, prompts=[*range(300)] * 10, seed=1)
    assert once is not None and often is not None
    assert (often["fitted_pairs"], often["pairs"], often["prompts"]) == (1500, 1500, 150)
    assert often["temperature"] == pytest.approx(once["temperature"], rel=1e-4)
    for name in ("ece_before", "ece_after", "ece_change"):
        assert often[name] == pytest.approx(once[name], rel=1e-6)


# ---------------------------------------------------------------- distance

REFERENCE = PolicyRef(uri="file:///reference", digest="d")


class ConstantReference:
    """Context, runtime and trainer in one: every token of the mask has log-probability -3."""

    seed = 0

    def __init__(self) -> None:
        self.runtime = self
        self.calls = 0

    def model(self, ref: PolicyRef) -> ModelSpec:
        return ModelSpec("reference", "lm", None, self.seed)

    def progress(self, done: int, total: int, text: str) -> None:
        assert done <= total

    @contextmanager
    def trainer(self, *_: Any) -> Iterator[ConstantReference]:
        yield self

    def logprobs(self, samples: Sequences, *, temperature: float) -> NDArray[np.float32]:
        self.calls += 1
        return -3.0 * samples.loss_mask.astype(np.float32)


def ratios(rows: list[Generation], context: ConstantReference) -> tuple[float, ...]:
    sampling = {"ppo": SamplingConfig(max_tokens=8)}
    return metrics.log_ratios(REFERENCE, {"ppo": rows}, sampling, context)["ppo"]


def generation(logprobs: tuple[float, ...], spans: tuple[ActionSpan, ...] = ()) -> Generation:
    completion = Completion((5,) * len(logprobs), logprobs, "text", "stop", 0, 0, spans)
    return Generation(Prompt("p", (Message("user", "p"),), "", "test"), (1, 2), completion)


def test_what_an_environment_wrote_does_not_count_as_distance():
    spans = (ActionSpan(0, 5, 0), ActionSpan(95, 100, 0))
    played = generation((-3.0,) * 5 + (0.0,) * 90 + (-3.0,) * 5, spans)
    assert ratios([played, generation((-1.0, -2.0))], ConstantReference()) == (0.0, 3.0)  # -3 + 3 + 3


def test_answers_go_to_the_reference_in_batches(monkeypatch):
    monkeypatch.setattr(metrics, "KL_BATCH", 2)
    context = ConstantReference()
    assert ratios([generation((float(-n),)) for n in range(5)], context) == (3.0, 2.0, 1.0, 0.0, -1.0)
    assert context.calls == 3
