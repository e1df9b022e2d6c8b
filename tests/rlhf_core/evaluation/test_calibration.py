"""The fitted temperature undoes a wrong scale of the scores, and is judged on pairs that it has not seen."""

from __future__ import annotations

import json
import math
import random

import pytest

from rlhf_core.evaluation.metrics import FEWEST, FLATTEST, SHARPEST, calibration_report, fit_temperature


def drawn_margins(count: int, *, scale: float, seed: int = 3) -> list[float]:
    """Return margins of pairs whose labels follow Bradley-Terry, multiplied by `scale`."""
    rng = random.Random(seed)
    true = [rng.gauss(0, 1.5) for _ in range(count)]
    signs = [1 if rng.random() < 1 / (1 + math.exp(-abs(margin))) else -1 for margin in true]
    return [scale * abs(margin) * sign for margin, sign in zip(true, signs, strict=True)]


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_temperature_is_the_scale_by_which_the_scores_are_wrong(scale: float) -> None:
    assert fit_temperature(drawn_margins(20000, scale=scale)) == pytest.approx(scale, rel=0.05)


def test_a_model_that_is_too_sure_is_calibrated_on_pairs_that_were_not_fitted() -> None:
    report = calibration_report(drawn_margins(4000, scale=4.0), prompts=range(4000), seed=1)
    assert report is not None
    assert report["fitted_pairs"] == report["pairs"] == 2000 and not report["at_bound"]
    assert report["temperature"] == pytest.approx(4.0, rel=0.15)
    assert report["ece_before"]["low"] > 0.1 > 0.05 > report["ece_after"]["value"]
    assert report["ece_change"]["high"] < 0
    assert report["ece_change"]["value"] == pytest.approx(report["ece_after"]["value"] - report["ece_before"]["value"])
    json.dumps(report, allow_nan=False)


def test_a_calibrated_model_is_not_made_better() -> None:
    report = calibration_report(drawn_margins(4000, scale=1.0), prompts=range(4000), seed=1)
    assert report is not None
    assert report["temperature"] == pytest.approx(1.0, rel=0.15)
    assert report["ece_change"]["low"] < 0.01 and report["ece_change"]["high"] > -0.01


def test_pairs_that_are_all_right_have_no_best_temperature_and_the_report_says_so() -> None:
    for margin, best in ((1.0, SHARPEST), (1000.0, SHARPEST), (-1.0, FLATTEST)):  # at 1000 the loss is 0 long before
        report = calibration_report([margin] * 40, prompts=range(40), seed=1)
        assert report is not None and report["at_bound"]
        assert report["temperature"] == best


def test_too_few_pairs_fit_nothing() -> None:
    for prompts, fitted in ((2 * FEWEST - 1, False), (2 * FEWEST, True)):
        report = calibration_report([1.0, -1.0] * prompts, prompts=[*range(prompts)] * 2, seed=1)
        assert (report is not None) is fitted  # pairs of one prompt are no more


def test_pairs_of_a_prompt_are_in_one_half_and_are_resampled_together() -> None:
    """Ten times the same pairs say no more than once: the same temperature, error and interval, but for the draws."""
    margins = drawn_margins(300, scale=3.0)
    once = calibration_report(margins, prompts=range(300), seed=1)
    often = calibration_report(margins * 10, prompts=[*range(300)] * 10, seed=1)
    assert once is not None and often is not None
    assert (often["fitted_pairs"], often["pairs"], often["prompts"]) == (1500, 1500, 150)
    assert often["temperature"] == pytest.approx(once["temperature"], rel=1e-4)
    for name in ("ece_before", "ece_after", "ece_change"):
        assert often[name] == pytest.approx(once[name], rel=1e-6)
