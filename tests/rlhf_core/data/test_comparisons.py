"""Verdicts, rankings and ratings become pairs; what can be read in two ways is refused."""

import math
import re
from typing import Any

import pytest

from pipelines.flows.profile import load_profile
from rlhf_core.config.data import Columns, RankingPairs
from rlhf_core.data.columns import Reading, detect
from rlhf_core.data.comparisons import Tie, Unrated, compared, ranked, responses, verdict_coding
from rlhf_core.data.formats import Example, convert_all
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import Message

# ---------------------------------------------------------------- comparisons

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
def test_a_verdict_in_words_names_the_better_answer(said, names):
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
def test_a_verdict_in_numbers_is_read_as_the_source_or_the_profile_says(said, names, others, coding):
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
def test_numbers_that_can_be_read_in_two_ways_are_refused_with_the_rule(said, names):
    with pytest.raises(DataError, match=r"preference_coding = 'auto'.*more than one way.*zero_based"):
        verdict_coding("s", "auto", [row(one, names) for one in said])


@pytest.mark.parametrize("said", ["tie", "Tie (bothbad)", "both", "neither", "EQUAL"])
def test_ties_are_neither_read_nor_malformed(said):
    with pytest.raises(Tie):
        compared(row(said), "auto")
    with pytest.raises(Tie):
        compared(row(0), "signed")


@pytest.mark.parametrize(("said", "coding"), [("best", "auto"), (None, "auto"), (3, "one_based"), ([1], "auto")])
def test_what_no_coding_knows_is_malformed(said, coding):
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
def test_a_ranking_becomes_the_pairs_that_were_asked_for(pairs, expected):
    assert detect(NECTAR) == "ranking"
    made = convert_all(NECTAR, "ranking", coding="auto", ranking_pairs=pairs)
    assert [(content.chosen[0].content, content.rejected[0].content) for content in made] == expected
    turns = (Message("user", "Hi."), Message("assistant", "Hello."), Message("user", "2+2?"))
    assert {content.prompt for content in made} == {turns}


def test_a_ranking_without_an_order_is_a_tie_and_one_without_ranks_is_malformed():
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
def test_a_row_with_answers_is_no_bare_prompt(extra):
    with pytest.raises(DataError, match=r"answers beside a bare prompt: \['.*format = 'prompt'"):
        detect({"prompt": "2+2?"} | extra)


@pytest.mark.parametrize(
    "extra", [{}, {"label": "4"}, {"num_responses": 7, "response": None, "answers": []}, {"source": "x", "level": 3}]
)
def test_a_prompt_with_other_columns_is_a_prompt(extra):
    assert detect({"prompt": "2+2?"} | extra) == "prompt"


def test_a_verdict_of_four_hundred_digits_is_no_number():
    with pytest.raises(DataError, match="not a preference: 1000"):
        read(row(10**400), [row("response1")])
    with pytest.raises(DataError, match="not a rank: 1000"):
        ranked({"prompt": "x", "answers": [{"answer": "a", "rank": 1}, {"answer": "b", "rank": 10**400}]}, "all")


# ---------------------------------------------------------------- ratings


def ultrafeedback(*answers: tuple[str, Any, Any]) -> dict[str, Any]:
    """Return a row as openbmb/UltraFeedback writes it: an overall score, and a rating for each aspect."""
    return {
        "source": "evol_instruct",
        "instruction": "2+2?",
        "models": ["m"] * len(answers),
        "completions": [
            {
                "model": "m",
                "response": text,
                "overall_score": overall,
                "annotations": {"helpfulness": {"Rating": str(helpful), "Rationale": "so"}, "honesty": {"Rating": "3"}},
            }
            for text, overall, helpful in answers
        ],
        "correct_answers": ["None"],
    }


FOUR = ultrafeedback(("four", 8.5, 4), ("4", 9, 5), ("five", 2, 1), ("4!", 9.0, 5))


def pairs_of(row: dict[str, Any], mode: RankingPairs = "max_min", **options: Any) -> list[Example]:
    return convert_all(row, detect(row), coding="auto", ranking_pairs=mode, **options)


def answers(contents: list[Example]) -> list[tuple[str, str, float]]:
    return [(one.chosen[0].content, one.rejected[0].content, one.margin) for one in contents]


@pytest.mark.parametrize(
    ("mode", "expected", "tied"),
    [
        ("max_min", [("4", "five", 7.0)], 0),
        ("adjacent", [("4!", "four", 0.5), ("four", "five", 6.5)], 1),
        (
            "all",
            [("4", "four", 0.5), ("4", "five", 7.0), ("4!", "four", 0.5), ("4!", "five", 7.0), ("four", "five", 6.5)],
            1,
        ),
    ],
)
def test_the_pairs_of_overall_scores_have_their_difference_as_margin(mode, expected, tied):
    made = pairs_of(FOUR, mode)
    assert detect(FOUR) == "ratings"
    assert answers(made) == expected
    assert made[0].prompt == (Message("user", "2+2?"),)
    assert sum(one.tied for one in made) == tied


def test_closer_ratings_than_the_smallest_margin_are_ties():
    made = pairs_of(FOUR, "all", min_margin=1.0)
    assert [margin for *_, margin in answers(made)] == [7.0, 7.0, 6.5]
    assert made[0].tied == 3
    with pytest.raises(Tie):
        pairs_of(FOUR, min_margin=7.5)


def test_weights_rate_by_aspects_in_place_of_the_overall_score():
    row = ultrafeedback(("wrong overall score", 10, 1), ("good", 2, 5))
    assert answers(pairs_of(row, rating_weights={"helpfulness": 0.5, "honesty": 1.0})) == [
        ("good", "wrong overall score", 2.0)
    ]
    with pytest.raises(DataError, match="no such aspect: 'wit' of rating_weights"):
        pairs_of(row, rating_weights={"wit": 1.0})


def test_equal_ratings_are_a_tie_and_missing_ones_are_not_judged():
    with pytest.raises(Tie):
        pairs_of(ultrafeedback(("a", 5, 3), ("b", 5.0, 4)))
    with pytest.raises(Unrated):
        pairs_of(ultrafeedback(("a", "N/A", 3), ("b", 5, 4)))
    assert answers(pairs_of(ultrafeedback(("a", "N/A", 3), ("b", 5, 4), ("c", "4", 4)))) == [("b", "c", 1.0)]


def test_a_rating_that_is_nan_is_missing_and_an_infinite_one_is_refused():
    rows = ultrafeedback(("a", math.nan, 3), ("b", 5, 4), ("c", 4.0, 4))
    assert answers(pairs_of(rows)) == [("b", "c", 1.0)]
    with pytest.raises(Unrated):
        pairs_of({"prompt": "2+2?", "completions": ["five", "4"], "ratings": [math.nan, 5.0]})
    with pytest.raises(DataError, match="not a rating: 'inf'"):
        pairs_of(ultrafeedback(("a", math.inf, 3), ("b", 5, 4)))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"ratings": [1, 5, 3]}, [("4", "five", 4.0)]),
        ({"scores": [-2.5, "1", None]}, [("4", "five", 3.5)]),
        ({"rewards": [0, 1, 0.5], "ranks": [1, 2, 3]}, [("4", "five", 1.0)]),  # numbers have a margin, ranks none
        ({"ranks": [3, 1, 2]}, [("4", "five", 0.0)]),
        ({"ranks": [2.5, "0", 2]}, [("4", "five", 0.0)]),
    ],
)
def test_two_lists_of_answers_and_numbers_are_read(numbers, expected):
    row = {"instruction": "2+2?", "generations": ["five", "4", {"text": "three"}], **numbers}
    name = detect(row)
    assert name == ("ranking" if [*numbers] == ["ranks"] else "ratings")
    assert answers(convert_all(row, name, coding="auto", ranking_pairs="max_min")) == expected
    (first,) = numbers.keys() - ({"ranks"} if len(numbers) > 1 else set())
    with pytest.raises(DataError, match=f"{first} and answers: 1 {first} for 3 answers"):
        convert_all(row | {first: [1]}, name, coding="auto", ranking_pairs="max_min")
    with pytest.raises(Tie):
        convert_all(row | {first: [2, 2, 2]}, name, coding="auto", ranking_pairs="all")
    with pytest.raises(DataError, match="not a rating: 'best'"):
        convert_all(row | {first: ["best", 2, 2]}, name, coding="auto", ranking_pairs="all")


@pytest.mark.parametrize("name", ["ranking", "rankings"])
def test_numbers_that_may_be_ranks_or_scores_are_refused_with_the_line_to_paste(name):
    row = {"prompt": "2+2?", "responses": ["five", "4"], name: [1, 2]}
    with pytest.raises(
        DataError, match=rf"unclear numbers: .*set columns = \{{ranks = '{name}'\}} or \{{scores = '{name}'\}}"
    ):
        detect(row)
    for ours, better in (("ranks", "five"), ("scores", "4")):
        read = Reading(row, Columns(**{ours: name}))
        (pair,) = convert_all(read, detect(read), coding="auto", ranking_pairs="max_min")
        assert pair.chosen[0].content == better and not pair.unread


@pytest.mark.parametrize("name", ["scores", "ranks", "rankings"])
def test_numbers_beside_rows_of_another_format_do_not_change_it(name):
    steps = {"prompt": "2+2?", "completions": ["2+2", "is 4"], "labels": [1, 1], name: [2, 1]}
    assert detect(steps) == "stepwise"
    assert detect(steps | {"ratings": [1, 2]}) == "ratings"
    assert detect({"instruction": "2+2?", "output": "4", "responses": ["5", "4"], name: [2, 1]}) == "alpaca"
    own = ultrafeedback(("a", 1, 3), ("b", 5, 4)) | {name: [2, 1]}
    assert detect(own) == "ratings" and answers(pairs_of(own)) == [("b", "a", 4.0)]
    assert detect(NECTAR | {name: [4, 3, 2, 1]}) == "ranking"
    (best,) = convert_all(NECTAR | {name: [4, 3, 2, 1]}, "ranking", coding="auto", ranking_pairs="max_min")
    assert best.chosen[0].content == "4"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"response": "4", "overall_score": 3, "rating": 4}, "ambiguous rating.*rating_weights"),
        ({"response": "4", "annotations": {"honesty": {"Rating": "3"}}}, "no overall rating.*rating_weights"),
        ({"response": "4", "overall_score": "high"}, "not a rating: 'high'"),
        ({"response": "4", "overall_score": True}, "not a rating: 'True'"),
        ({"overall_score": 3}, "no text in an answer"),
        ("plain", "not rated: an answer is plain text"),
    ],
)
def test_ambiguous_ratings_are_refused(answer, reason):
    row = {"prompt": "2+2?", "completions": [{"response": "five", "overall_score": 1}, answer]}
    with pytest.raises(DataError, match=reason):
        pairs_of(row)


def test_a_pair_with_two_scores_has_their_difference_as_margin_and_equal_scores_are_a_tie():
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 8.0, "score_rejected": 6.5}
    assert pairs_of(pair)[0].margin == 1.5
    assert pairs_of(pair | {"margin": 3})[0].margin == 3.0
    with pytest.raises(Tie):
        pairs_of(pair | {"score_rejected": 8})
    with pytest.raises(DataError, match="chosen is rated below rejected: score_chosen is 8, score_rejected is 9"):
        pairs_of(pair | {"score_rejected": 9})


def test_aspects_in_columns_are_a_reward_with_weights():
    row = {"prompt": "2+2?", "completion": "4", "helpfulness": 4, "verbosity": 1}
    weights = {"helpfulness": 1.0, "verbosity": -0.5}
    (scored,) = convert_all(row, "scored", coding="auto", ranking_pairs="max_min", rating_weights=weights)
    assert scored.reward == 3.5


@pytest.mark.parametrize(
    ("thumbs", "good"), [("up", True), ("thumbs-down", False), ("👍", True), (-1, False), (True, True)]
)
def test_thumbs_are_unpaired_feedback(thumbs, good):
    row = {"prompt": "2+2?", "completion": "4", "thumbs": thumbs, "annotator": 7}
    (content,) = pairs_of(row)
    assert detect(row) == "unpaired_preference"
    assert content.judged and bool(content.chosen) is good and bool(content.rejected) is not good
    assert content.annotator == "7"


def test_no_thumb_is_not_judged_and_an_unclear_one_is_refused():
    with pytest.raises(Unrated):
        pairs_of({"prompt": "2+2?", "completion": "4", "thumbs": ""})
    with pytest.raises(DataError, match=r"not a thumb: 0; .*for 1 and 0: columns"):
        pairs_of({"prompt": "2+2?", "completion": "4", "thumbs": 0})


# ---------------------------------------------------------------- under other names

TEXTS = [
    ({"question": "2+2?", "answer_a": "5", "answer_b": "4", "winner": "b"}, "auto"),
    ({"question": "2+2?", "answer_a": "5", "answer_b": "4", "winner": "answer_b"}, "auto"),
    ({"prompt": "2+2?", "answer_1": "5", "answer_2": "4", "better": 2}, "one_based"),
    ({"prompt": "2+2?", "OutputA": "5", "OutputB": "4", "preferred": "B", "model_a": "x", "model_b": "y"}, "auto"),
    # The columns of SHP and of HelpSteer3.
    (
        {
            "post_id": "1",
            "history": "2+2?",
            "human_ref_A": "5",
            "human_ref_B": "4",
            "labels": 0,
            "score_A": 1,
            "score_B": 3,
        },
        "first_is_one",
    ),
    (
        {
            "context": [{"role": "user", "content": "2+2?"}],
            "response1": "5",
            "response2": "4",
            "overall_preference": 2,
            "domain": "math",
        },
        "signed",
    ),
]


@pytest.mark.parametrize(("given", "coding"), TEXTS)
def test_a_comparison_under_other_names_is_refused_with_the_line_that_reads_it(given, coding):
    with pytest.raises(DataError, match=r"^two answers of a comparison: ") as refused:
        detect(given)
    (line,) = re.findall(r"columns = \{(.*?)\}", str(refused.value))
    columns = Columns(**dict(part.replace('"', "").split(" = ") for part in line.split(", ")))
    (example,) = read(Reading(given, columns), [], coding)
    assert (example.prompt, example.chosen, example.rejected) == (ASK, GOOD, BAD)
    assert ("preference_coding" in str(refused.value)) == (coding != "auto")


@pytest.mark.parametrize(
    ("ask", "winner"),
    [([{"role": "user", "content": "2+2?"}], "model_b"), ([{"role": "user", "content": "2+2?"}], "conversation_b")],
)
def test_two_conversations_are_refused_with_the_function_that_makes_a_comparison_of_them(ask, winner):
    sides = {
        f"conversation_{side}": [*ask, {"role": "assistant", "content": text}]
        for side, text in (("a", "5"), ("b", "4"))
    }
    given = {"model_a": "one", "model_b": "other", "winner": winner, **sides}
    with pytest.raises(DataError, match="write the rows anew with this function") as refused:
        detect(given)
    function = str(refused.value).partition("function:\n")[2]
    assert len(function.splitlines()) == 3
    names: dict[str, Any] = {}
    exec(function, names)
    made = names["comparison"](given)
    (example,) = read(made, [])
    assert (example.prompt, example.chosen, example.rejected) == (ASK, GOOD, BAD)


def test_choices_of_a_question_are_no_comparison():
    with pytest.raises(DataError, match=r"^(?!two answers)"):
        detect({"query_text": "Which?", "option_a": "4", "option_b": "5", "label": "a"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(
            ("response_a", "response1"),
            ("response_A", "response1"),
            ("response_b", "response2"),
            ("answer_b", "response2"),
        ),
        *(("reponse1", "response1"), ("response3", ""), ("choosen", "chosen")),
    ],
)
def test_the_other_side_is_never_suggested_for_a_column(name, meant):
    source = f'{{name = "r", path = "r.jsonl", use = {{preferences = 1.0}}, columns = {{{name} = "x"}}}}'
    with pytest.raises(ConfigError) as refused:
        load_profile("tiny/rlvr", [f'prepare_data.data = {{type = "files", sources = [{source}]}}'])
    assert str(refused.value).endswith(f"columns.{meant}?" if meant else "remove it")
