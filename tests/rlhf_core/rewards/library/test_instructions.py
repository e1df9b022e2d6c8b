"""Each check accepts what follows the instruction and refuses what nearly does."""

import json
import re
from typing import Any

import pytest

from rlhf_core.errors import RewardError
from rlhf_core.rewards.library.instructions import CHECKS, follows, instructions_followed, on_topic

GOOD_AND_BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"kind": "lowercase"}, "rain is water, 2 cups.", "Rain is water."),
    ({"kind": "lowercase"}, "7 cups", "12 + 30"),  # nothing has a case
    ({"kind": "lowercase"}, "é 7", "水"),
    ({"kind": "uppercase"}, "RAIN IS WET.", "RAIN IS Wet."),
    ({"kind": "uppercase"}, "A 7", "7, 8."),
    ({"kind": "uppercase"}, "IS IT 水?", "水"),
    ({"kind": "at_most_words", "count": 3}, "It's well-known, really.", "It is well known."),
    ({"kind": "at_least_words", "count": 3}, "one two three", "one, two -"),
    ({"kind": "first_word", "word": "Well"}, '"well, rain is wet."', "Wells are deep."),
    ({"kind": "last_word", "word": "today"}, "It rains Today!", "Today it rains"),
    ({"kind": "keyword", "word": "good"}, "A GOOD cat.", "Goodness, a cat."),
    ({"kind": "keyword", "word": "New York"}, "In new york, a cat.", "A new cat in York."),
    ({"kind": "no_commas"}, "Cats and dogs.", "Cats, dogs."),
    ({"kind": "exclamation"}, "Rain! \n", "Rain! Yes."),
    ({"kind": "exclamation"}, "7!", "!"),
    ({"kind": "question"}, "7?", "?"),
    ({"kind": "quoted"}, '"7"', '"..."'),
    ({"kind": "sentences", "count": 1}, "7.", "..."),
    ({"kind": "question"}, "Is it rain?", "Is it? Rain."),
    ({"kind": "quoted"}, ' "Rain is wet." ', 'He said "rain"'),
    ({"kind": "json", "key": "answer"}, '```json\n{"answer": "rain"}\n```', '{"answer": ["rain"]}'),
    ({"kind": "sentences", "count": 1}, "Rain is water, 3.5 times.", "Rain. It is wet."),
    ({"kind": "sentences", "count": 2}, 'Rain. (I said "it is wet.")', "Rain. It is wet"),
]


@pytest.mark.parametrize(("instruction", "good", "bad"), GOOD_AND_BAD, ids=lambda value: str(value)[:30])
def test_a_check_tells_apart_what_follows_from_what_nearly_does(instruction, good, bad):
    assert follows(good, instruction)
    assert not follows(bad, instruction)


def test_every_kind_of_instruction_is_tested_and_none_holds_for_an_empty_answer():
    assert {instruction["kind"] for instruction, *_ in GOOD_AND_BAD} == set(CHECKS)
    assert [instruction for instruction, *_ in GOOD_AND_BAD if follows(" \n", instruction)] == []


@pytest.mark.parametrize(
    ("instruction", "problem"),
    [
        ({"kind": "sentences", "count": "3"}, "count = '3' is no whole number"),
        ({"kind": "at_least_words", "count": 2.5}, "count = 2.5 is no whole number"),
        ({"kind": "at_least_words", "count": 0}, "count = 0 is no whole number from 1 on"),
        ({"kind": "keyword", "word": ""}, "word = '' is no word"),
        ({"kind": "keyword", "word": "C++"}, "word = 'C++' is no word, or has other signs"),
        ({"kind": "first_word", "word": "!"}, "word = '!' is no word"),
        ({"kind": "json", "key": 1}, "key = 1 is no text"),
    ],
)
def test_an_option_that_no_answer_or_every_answer_would_follow_is_refused(instruction, problem):
    with pytest.raises(RewardError, match=re.escape(problem)):
        instructions_followed([""], ['{"a": "b"}'], [label(instruction)])


def test_the_gate_of_the_topic_refuses_a_count_that_is_no_number():
    with pytest.raises(RewardError, match=re.escape("count = '2' is no whole number")):
        on_topic([""], ["Rain falls."], [label({"kind": "at_most_words", "count": "2"})])


def test_loose_forgives_a_first_line_and_asterisks():
    text = "Sure, here it is:\n*rain is water*"
    assert not follows(text, {"kind": "lowercase"})
    assert follows(text, {"kind": "lowercase"}, loose=True)
    assert not follows("Rain\nIs\nWater", {"kind": "lowercase"}, loose=True)


def label(*instructions: dict[str, Any], topic: tuple[str, ...] = ("rain", "cloud"), min_words: int = 6) -> str:
    return json.dumps({"instructions": instructions, "topic": topic, "min_words": min_words})


def test_the_share_of_instructions_and_all_of_them():
    both = label({"kind": "no_commas"}, {"kind": "exclamation"})
    texts, labels = ["rain!", "rain", "rain, so"], [both, both, both]
    assert instructions_followed([""] * 3, texts, labels) == [1.0, 0.0, 0.0]
    assert instructions_followed([""] * 3, texts, labels, partial=True) == [1.0, 0.5, 0.0]
    assert instructions_followed([""], ["rain"], [None]) == [None]


def test_one_word_is_no_answer_unless_it_was_asked_for():
    long = "Clouds give water that falls down."
    texts = [long, "Rain.", "Water that falls down from above.", "Rain, that is it."]
    assert on_topic([""] * 4, texts, [label({"kind": "no_commas"})] * 4) == [1.0, 0.0, 0.0, 0.0]
    assert on_topic([""], ["Rain falls."], [label({"kind": "at_most_words", "count": 2})]) == [1.0]


@pytest.mark.parametrize(
    "text", ["rain", "[]", '{"instructions": []}', '{"instructions": [{}], "topic": [], "min_words": 1}', "[" * 9999]
)
def test_a_label_of_another_form_is_refused(text):
    with pytest.raises(RewardError, match="label = "):
        instructions_followed([""], ["rain"], [text])
