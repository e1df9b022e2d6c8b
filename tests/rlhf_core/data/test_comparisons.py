"""Rows that compare answers: every spelling of a verdict, and none that can be read in two ways."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.data.columns import detect
from rlhf_core.data.comparisons import Tie, compared, ranked, responses, verdict_coding
from rlhf_core.data.formats import Example, convert_all
from rlhf_core.errors import DataError
from rlhf_core.types import Message

ASK = (Message("user", "2+2?"),)
GOOD, BAD = (Message("assistant", "4"),), (Message("assistant", "5"),)


def row(preference: Any, names: tuple[str, str] = ("response1", "response2")) -> dict[str, Any]:
    """The second answer is the right one."""
    return {"prompt": "2+2?", names[0]: "5", names[1]: "4", "preference": preference}


def read(one: dict[str, Any], others: list[dict[str, Any]], coding: Any = "auto") -> list[Example]:
    coding = verdict_coding("s", coding, [one, *others])
    return convert_all(one, detect(one), coding=coding, ranking_pairs="max_min")


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("response2", ("response1", "response2")),
        ("Response 2", ("response1", "response2")),
        ("response_1", ("response_0", "response_1")),
        ("B", ("response1", "response2")),
        ("second", ("response_1", "response_2")),
        ("model_b", ("response_a", "response_b")),
        ("response_B", ("response_A", "response_B")),
    ],
)
def test_a_verdict_in_words_names_the_better_answer(said: str, names: tuple[str, str]) -> None:
    assert responses(row(said, names)) == names
    assert read(row(said, names), []) == [Example(ASK, GOOD, BAD)]


@pytest.mark.parametrize(
    ("said", "names", "others", "coding"),
    [
        (2, ("response1", "response2"), [1, 1], "auto"),
        ("2", ("response1", "response2"), ["1"], "auto"),
        (2.0, ("response_a", "response_b"), [], "auto"),
        (1, ("response_0", "response_1"), [0], "auto"),
        (1, ("response1", "response2"), [0, 1], "zero_based"),
        (0, ("response1", "response2"), [0, 1], "first_is_one"),
        (False, ("response1", "response2"), [True], "first_is_one"),
        (2, ("response1", "response2"), [-3, 0], "signed"),
    ],
)
def test_a_verdict_in_numbers_is_read_as_the_source_or_the_profile_says(
    said: Any, names: tuple[str, str], others: list[Any], coding: str
) -> None:
    assert read(row(said, names), [row(other, names) for other in others], coding) == [Example(ASK, GOOD, BAD)]


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ([0, 1], ("response1", "response2")),  # places, or "the first is better"
        ([1, 1], ("response1", "response2")),  # the first of 1 and 2, or the second of 0 and 1
        ([1, 1], ("response_0", "response_1")),
        ([0, 1, 2], ("response1", "response2")),  # is 0 a tie, or 2?
        ([True, False], ("response_0", "response_1")),
        ([-3, 2], ("response1", "response2")),
        ([1, 2], ("response_0", "response_1")),
    ],
)
def test_numbers_that_can_be_read_in_two_ways_are_refused_with_the_rule(
    said: list[Any], names: tuple[str, str]
) -> None:
    with pytest.raises(DataError, match=r"preference_coding = 'auto'.*more than one way.*zero_based"):
        verdict_coding("s", "auto", [row(one, names) for one in said])


@pytest.mark.parametrize("said", ["tie", "Tie (bothbad)", "both", "neither", "EQUAL"])
def test_ties_are_neither_read_nor_malformed(said: str) -> None:
    with pytest.raises(Tie):
        compared(row(said), "auto")
    with pytest.raises(Tie):
        compared(row(0), "signed")


@pytest.mark.parametrize(("said", "coding"), [("best", "auto"), (None, "auto"), (3, "one_based"), ([1], "auto")])
def test_what_no_coding_knows_is_malformed(said: Any, coding: Any) -> None:
    with pytest.raises(DataError, match="not a preference"):
        compared(row(said), coding)


NECTAR = {
    "prompt": "\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: 2+2?\n\nAssistant: ",
    "answers": [
        {"answer": str(number), "model": "m", "rank": rank} for number, rank in ((6, 3), (4, 1), (5, 2), (7, 3))
    ],
    "turns": 2,
    "num_responses": 4,
}


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ("max_min", [("4", "7")]),
        ("adjacent", [("4", "5"), ("5", "6")]),  # 6 and 7 share a rank
        ("all", [("4", "5"), ("4", "6"), ("4", "7"), ("5", "6"), ("5", "7")]),
    ],
)
def test_a_ranking_becomes_the_pairs_that_were_asked_for(pairs: Any, expected: list[tuple[str, str]]) -> None:
    assert detect(NECTAR) == "ranking"
    made = convert_all(NECTAR, "ranking", coding="auto", ranking_pairs=pairs)
    assert [(content.chosen[0].content, content.rejected[0].content) for content in made] == expected
    turns = (Message("user", "Hi."), Message("assistant", "Hello."), Message("user", "2+2?"))
    assert {content.prompt for content in made} == {turns}


def test_a_ranking_without_an_order_is_a_tie_and_one_without_ranks_is_malformed() -> None:
    same = [{"answer": "4", "rank": 1}, {"answer": "5", "rank": 1}]
    with pytest.raises(Tie):
        ranked({"prompt": "2+2?", "answers": same}, "all")
    for answers, reason in (
        ([{"answer": "4", "rank": 1}], "at least two"),
        ([{"answer": "4", "rank": 1}, {"answer": "5"}], "needs an answer and a rank"),
        ([{"answer": "4", "rank": 1}, {"answer": "5", "rank": "low"}], "not a rank: 'low'"),
    ):
        with pytest.raises(DataError, match=reason):
            ranked({"prompt": "2+2?", "answers": answers}, "max_min")


@pytest.mark.parametrize(
    "extra",
    [
        {"response": "4"},
        {"responses": ["4", "5"]},
        {"response1": "4", "response2": "5"},
        {"response_0": "4", "response_1": "5", "better_response_id": 0, "safer_response_id": 1},
        {"answers": [{"text": "4", "score": 1.0}]},
        {"answer": "4"},
        {"chosen": "4"},
        {"modelOutput": "4"},
        {"winner": 0},
    ],
)
def test_a_row_with_answers_is_no_bare_prompt(extra: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"answers beside a bare prompt: \['.*format = 'prompt'"):
        detect({"prompt": "2+2?"} | extra)


@pytest.mark.parametrize(
    "extra", [{}, {"label": "4"}, {"num_responses": 7, "response": None, "answers": []}, {"source": "x", "level": 3}]
)
def test_a_prompt_with_other_columns_is_a_prompt(extra: dict[str, Any]) -> None:
    assert detect({"prompt": "2+2?"} | extra) == "prompt"


def test_a_verdict_of_four_hundred_digits_is_no_number() -> None:
    with pytest.raises(DataError, match="not a preference: 1000"):
        read(row(10**400), [row("response1")])
    with pytest.raises(DataError, match="not a rank: 1000"):
        ranked({"prompt": "x", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 10**400}]}, "all")
