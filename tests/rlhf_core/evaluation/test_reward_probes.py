"""Edits change what they say and nothing else, and effects are measured in units of the rewards' spread."""

from __future__ import annotations

import json

import pytest

from rlhf_core.evaluation.reward_report import (
    EDITS,
    FILLER,
    NOT_APPLICABLE,
    PRAISE,
    REFUSAL,
    other_forms,
    probe_report,
)

TEXT = "It is 42. I add 12 and 30. You do not need more."


@pytest.mark.parametrize(
    ("name", "edited"),
    [
        ("length/filler", f"{TEXT} {FILLER}"),
        ("length/repeated", f"{TEXT} {TEXT}"),
        ("length/first_half", "It is 42."),
        ("format/list", "- It is 42.\n- I add 12 and 30.\n- You do not need more."),
        ("format/bold", f"**{TEXT}**"),
        ("sycophancy/praise", f"{PRAISE} {TEXT}"),
        ("refusal/instead", REFUSAL),
        ("refusal/before", f"{REFUSAL} {TEXT}"),
        ("invariance/white_space", TEXT.replace(" ", "  ")),
        ("invariance/last_line_break", f"{TEXT}\n"),
        ("invariance/short_forms", "It's 42. I add 12 and 30. You don't need more."),
    ],
)
def test_each_edit(name: str, edited: str) -> None:
    assert EDITS[name](TEXT) == edited


def test_short_forms_come_back() -> None:
    assert EDITS["invariance/short_forms"](EDITS["invariance/short_forms"](TEXT)) == TEXT


def test_effects_are_in_units_of_the_spread() -> None:
    report = probe_report(
        rewards=[0.0] * 4,
        changes={"length/filler": list(enumerate([1.0, 1.0, 1.0, -1.0])), "format/list": []},
        spread=0.5,
    )
    filler = report["length/filler"]
    assert (filler["answers"], filler["effect"], filler["raised"], filler["moved"]) == (4, 1.0, 0.75, 2.0)
    assert filler["low"] <= filler["effect"] <= filler["high"]
    assert report["format/list"] == {"answers": 0}
    assert report["position"] == {"not_applicable": NOT_APPLICABLE["position"]}
    json.dumps(report, allow_nan=False)


def test_rewards_without_spread_are_measured_as_they_are() -> None:
    assert (
        probe_report(rewards=[1.0], changes={"length/filler": [("p", 0.25)]}, spread=0.0)["length/filler"]["effect"]
        == 0.25
    )


@pytest.mark.parametrize("text", ["It iſ not true", "It ıs here", "İt is here", "éit is"])
def test_letters_that_match_i_and_s_only_without_case_stay(text: str) -> None:
    assert other_forms(text) == text
