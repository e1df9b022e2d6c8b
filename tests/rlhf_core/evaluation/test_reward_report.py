"""The report of a reward model, on scores whose answer is known."""

from __future__ import annotations

import json
import math
import random

import pytest

from rlhf_core.evaluation.reward_report import accuracy_difference, reward_model_report


def test_a_small_report_by_hand() -> None:
    report, figures = reward_model_report(
        chosen_scores=[2.0, 1.0, 0.0, 1.0],
        rejected_scores=[0.0, 1.0, 1.0, 0.0],
        chosen_lengths=[10, 5, 5, 20],
        rejected_lengths=[5, 5, 10, 10],
        sources=["a", "a", "b", "b"],
        prompts=["p", "p", "q", "r"],
        seed=1,
    )
    assert (report["pairs"], report["prompts"]) == (4, 3)
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


def test_pairs_of_one_prompt_are_no_more_evidence_than_one() -> None:
    """Seven pairs of each of ten prompts, nine of them ordered right: as ten pairs, and not as seventy."""
    scores = [1.0] * 63 + [-1.0] * 7
    found = {}
    for name, prompts, count in (("prompts", [at // 7 for at in range(70)], 70), ("pairs", range(10), 10)):
        report, _ = reward_model_report(
            chosen_scores=scores[:: 70 // count],
            rejected_scores=[0.0] * count,
            chosen_lengths=[1] * count,
            rejected_lengths=[1] * count,
            sources=["s"] * count,
            prompts=prompts,
            seed=1,
        )
        found[name] = [report[key] for key in ("accuracy", "accuracy_low", "accuracy_high", "prompts")]
        assert report["slices"]["same length"]["low"] == report["accuracy_low"]
    assert found["prompts"] == pytest.approx(found["pairs"])


def test_the_difference_of_two_models_is_that_of_their_hits_on_the_same_pairs() -> None:
    """Both order 40 of 50 pairs alike; of the rest, one orders eight right and two wrong: 6 of 50, and it is significant.

    Two intervals around 96 % and 84 % overlap.
    """
    ours, theirs = [1.0] * 48 + [0.0] * 2, [1.0] * 40 + [0.0] * 8 + [1.0] * 2
    found = accuracy_difference(ours, theirs, range(50))
    assert found["mean"] == pytest.approx(0.12) and found["prompts"] == 50
    # Five prompts of ten pairs each: those that differ are of one prompt, which shows nothing.
    clustered = accuracy_difference(ours, theirs, [at // 10 for at in range(50)])
    assert clustered["mean"] == pytest.approx(0.12) and clustered["low"] < 0
    assert clustered["low"] < found["low"] and accuracy_difference(ours[:48], theirs[:48], range(48))["low"] > 0


def test_a_model_that_scores_length_alone_is_found_out() -> None:
    rng = random.Random(1)
    chosen, rejected = [rng.randint(5, 50) for _ in range(200)], [rng.randint(5, 50) for _ in range(200)]
    report, _ = reward_model_report(
        chosen_scores=[float(n) for n in chosen],
        rejected_scores=[float(n) for n in rejected],
        chosen_lengths=chosen,
        rejected_lengths=rejected,
        sources=["s"] * 200,
        prompts=range(200),
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
            prompts=range(4000),
            seed=1,
        )
        return float(report["ece"])

    assert error(1.0) < 0.025  # sampling noise of ten bins of 400 pairs
    assert error(5.0) > 0.1  # five times too sure
