"""The report of a reward model, on scores whose answer is known."""

from __future__ import annotations

import json
import math
import random

import pytest

from rlhf_core.evaluation.reward_report import reward_model_report


def test_a_small_report_by_hand() -> None:
    report, figures = reward_model_report(
        chosen_scores=[2.0, 1.0, 0.0, 1.0],
        rejected_scores=[0.0, 1.0, 1.0, 0.0],
        chosen_lengths=[10, 5, 5, 20],
        rejected_lengths=[5, 5, 10, 10],
        sources=["a", "a", "b", "b"],
        seed=1,
    )
    assert report["pairs"] == 4
    assert report["accuracy"] == (1 + 0.5 + 0 + 1) / 4
    assert report["margin_mean"] == (2 + 0 - 1 + 1) / 4
    assert {name: item["accuracy"] for name, item in report["slices"].items()} == {
        "source: a": 0.75,
        "source: b": 0.5,
        "chosen is longer": 1.0,
        "chosen is shorter": 0.0,
        "same length": 0.5,
    }
    assert report["accuracy_low"] <= report["accuracy"] <= report["accuracy_high"]
    assert set(figures) == {"reliability", "margins", "length"}
    assert all(png.startswith(b"\x89PNG") for png in figures.values())
    json.dumps(report, allow_nan=False)


def test_a_model_that_scores_length_alone_is_found_out() -> None:
    rng = random.Random(1)
    chosen, rejected = [rng.randint(5, 50) for _ in range(200)], [rng.randint(5, 50) for _ in range(200)]
    report, _ = reward_model_report(
        chosen_scores=[float(n) for n in chosen],
        rejected_scores=[float(n) for n in rejected],
        chosen_lengths=chosen,
        rejected_lengths=rejected,
        sources=["s"] * 200,
        seed=1,
    )
    assert report["length_correlation"] == pytest.approx(1.0)
    assert report["margin_length_correlation"] == pytest.approx(1.0)
    assert report["slices"]["chosen is longer"]["accuracy"] == 1.0
    assert report["slices"]["chosen is shorter"]["accuracy"] == 0.0


def test_labels_drawn_from_the_model_itself_leave_no_calibration_error() -> None:
    rng = random.Random(4)
    margins = [abs(rng.gauss(0, 1.5)) for _ in range(4000)]
    signs = [1 if rng.random() < 1 / (1 + math.exp(-margin)) else -1 for margin in margins]

    def error(scale: float) -> float:
        report, _ = reward_model_report(
            chosen_scores=[scale * sign * margin for sign, margin in zip(signs, margins)],
            rejected_scores=[0.0] * 4000,
            chosen_lengths=[1] * 4000,
            rejected_lengths=[1] * 4000,
            sources=["s"] * 4000,
            seed=1,
        )
        return float(report["ece"])

    assert error(1.0) < 0.025  # sampling noise of ten bins of 400 pairs
    assert error(5.0) > 0.1  # five times too sure
