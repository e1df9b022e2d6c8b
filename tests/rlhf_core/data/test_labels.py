"""A label is a verdict or an expected answer for all rows of a source, by all of its labels."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.config.data import Source, Use
from rlhf_core.data.columns import label_reading, refuse_verdict
from rlhf_core.errors import DataError

LEARN, COMPARE, ASK = {"demonstrations": 1.0}, {"preferences": 1.0}, {"prompts": 1.0}


def source(use: dict[str, float] = LEARN, **options: Any) -> Source:
    return Source(name="s", path="s.jsonl", use=Use(**use), **options)


def rows(*labels: Any) -> list[dict[str, Any]]:
    return [{"prompt": "p", "completion": "c", "label": label} for label in labels]


@pytest.mark.parametrize(
    ("labels", "reading"),
    [
        ((True, False, None), "verdict"),
        ((None, "", "desirable", "Undesirable "), "verdict"),
        (("true", 1, 0), "verdict"),
        (("chosen", "rejected"), "verdict"),
        (("👍", "👎"), "verdict"),
        (("1", "2", "0"), "answer"),
        ((1.0, 0.5), "answer"),
        (("Paris", "4", "Rome"), "answer"),
        (("x",) * 20, "answer"),
        (({"a": 1}, [1]), "answer"),
        ((None, ""), "answer"),
        ((True, False, "maybe"), "verdict"),
        ((True, "maybe"), "verdict"),
        (("4", "5", "true"), "answer"),
    ],
)
def test_all_labels_decide(labels: tuple[Any, ...], reading: str) -> None:
    for order in (labels, labels[::-1]):
        assert label_reading(source(), "messages", rows(*order)) == reading


@pytest.mark.parametrize(
    "labels",
    [
        *((0, 1), ("1", "1"), ("1.0", "0.0"), (-1, 1), ("yes", "no") * 4, ("ok", "toxic") * 4),
        *(("bad",) * 8, ("good", "bad", "neutral") * 3, ("correct", "incorrect", "4", "5") * 2),
    ],
)
def test_labels_that_can_be_read_both_ways_need_a_word_of_the_profile(labels: tuple[Any, ...]) -> None:
    with pytest.raises(DataError, match=r"sources\[s\].label_coding = 'auto': the labels are .*; set it to 'verdict'"):
        label_reading(source(), "prompt_completion", rows(*labels))
    for coding in ("verdict", "answer"):
        assert label_reading(source(label_coding=coding), "messages", rows(*labels)) == coding
    assert label_reading(source(format="unpaired_preference"), "unpaired_preference", rows(*labels)) == "verdict"
    assert label_reading(source(format="prompt_completion"), "prompt_completion", rows(*labels)) == "answer"


def test_where_only_one_reading_is_of_use_it_is_taken() -> None:
    for labels in ((0, 1), ("good", "bad", "neutral") * 3):
        assert label_reading(source(ASK), "prompt_completion", rows(*labels)) == "answer"
    assert label_reading(source(ASK), "prompt_completion", rows(True, False)) == "verdict"
    with pytest.raises(DataError, match="the labels are false, true"):  # a KTO table, or questions of yes and no
        label_reading(source(ASK), "prompt_completion", rows("True", "False"))
    assert label_reading(source(COMPARE), "prompt_completion", rows(0, 1)) == "verdict"
    assert label_reading(source(), "prompt", rows(True, False)) == "answer"  # there is no answer to judge


def test_a_verdict_among_expected_answers_is_refused() -> None:
    with pytest.raises(DataError, match="mixed labels: True is a verdict, where most labels are expected answers"):
        refuse_verdict({"label": True}, source())
    refuse_verdict({"label": True}, source(label_coding="answer"))
    refuse_verdict({"label": "4"}, source())
