"""Figures of a process reward model, counted by hand."""

from __future__ import annotations

import json
import math

import pytest

from rlhf_core.evaluation.reward_report import step_report

SURE = math.log(9)  # probability 0.9, and 0.1 negated


def test_steps_and_first_errors_are_counted() -> None:
    labels = [(1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 0.0), (1.0,)]
    logits = [(SURE, SURE), (SURE, -SURE, SURE), (SURE, -SURE), (-SURE,)]
    report, figures = step_report(logits=logits, labels=labels, prompts="aabc")
    assert (report["answers"], report["steps"], report["right_steps"], report["prompts"]) == (4, 8, 4, 3)
    # wrong: the third step of the second answer, the first of the third, the only one of the last
    assert report["accuracy"] == 5 / 8
    assert report["first_error_accuracy"] == 2 / 4  # the first (no error) and the second answer
    assert report["first_error_accuracy_with_error"] == 1 / 2
    assert report["first_error_accuracy_without_error"] == 1 / 2
    assert report["f1"] == 1 / 2
    # at 0.9: five steps, of which three are right; at 0.1: three steps, of which one is
    assert report["ece"] == pytest.approx((5 * abs(0.9 - 3 / 5) + 3 * abs(0.1 - 1 / 3)) / 8)
    assert json.loads(json.dumps(report)) == report
    assert figures["reliability"].startswith(b"\x89PNG")


def test_soft_labels_count_by_what_is_likelier_and_calibrate_as_they_are() -> None:
    report, _ = step_report(logits=[(SURE, -SURE)], labels=[(0.9, 0.1)], prompts="a")
    assert report["accuracy"] == report["first_error_accuracy"] == 1.0
    assert report["ece"] == pytest.approx(0.0, abs=1e-12)
    assert report["f1"] is None  # no answer without an error
