"""Exports of Label Studio and Argilla become preferences, and what can be read in two ways is refused."""

import json
from typing import Any

import pytest

from rlhf_core.config.data import Files, Source
from rlhf_core.data.columns import detect
from rlhf_core.data.comparisons import Tie, Unrated
from rlhf_core.data.exports import preference_rows, read_record
from rlhf_core.data.files import make_tables
from rlhf_core.data.limits import DropReport
from rlhf_core.errors import DataError


def source(**options: Any) -> Source:
    return Source(name="s", path="export.json", use={"preferences": 1.0}, **options)


def pairs_of(row: dict[str, Any], **options: Any) -> list[tuple[str, str, float, str]]:
    rows, _ = preference_rows(read_record(row, detect(row), source(**options)), pairs="all", min_margin=0.0)
    return [(one["chosen"], one["rejected"], one["margin"], one.get("annotator", "")) for one in rows]


# ---------------------------------------------------------------- Label Studio

DATA = {"prompt": "2+2?", "answer1": "4", "answer2": "5"}


TWO = {"response1": "answer1", "response2": "answer2"}
QUESTIONS = {"q1": "answer1", "q2": "answer2"}


def annotation(value: dict[str, Any], *, kind: str = "pairwise", who: Any = 1, **options: Any) -> dict[str, Any]:
    to_name = options.pop("to_name", "answer1,answer2")
    result = {"id": "x", "from_name": options.pop("name", "pw"), "to_name": to_name, "type": kind, "value": value}
    return {"id": 10, "completed_by": who, "was_cancelled": False, "lead_time": 4.5, "result": [result], **options}


def task(*annotations: dict[str, Any], data: dict[str, Any] = DATA) -> dict[str, Any]:
    return {"id": 7, "data": data, "annotations": list(annotations), "predictions": [{"result": []}]}


def test_a_pairwise_task_is_a_preference_for_the_selected_side():
    assert detect(task()) == "label_studio"
    assert pairs_of(task(annotation({"selected": "left"}))) == [("4", "5", 1.0, "1")]
    assert pairs_of(task(annotation({"selected": "right"}))) == [("5", "4", 1.0, "1")]
    swapped = annotation({"selected": "left"}, to_name=["answer2", "answer1"])
    assert pairs_of(task(swapped)) == [("5", "4", 1.0, "1")]
    assert pairs_of(task(swapped), columns=TWO) == [("5", "4", 1.0, "1")]


def test_the_readers_give_the_choice_and_the_time_of_each_annotator():
    rows = annotation({"selected": "right"}, who={"id": 3, "email": "jo@example.com"}), annotation({"selected": "left"})
    judged = read_record(task(*rows), "label_studio", source())
    assert (judged.id, judged.prompt, judged.answers) == ("7", "2+2?", ("4", "5"))
    said = [(one.annotator, one.choice, one.seconds) for one in judged.verdicts]
    assert said == [("3", "second", 4.5), ("1", "first", 4.5)]


def test_several_annotators_vote_and_an_even_vote_is_a_tie():
    left, right = annotation({"selected": "left"}), annotation({"selected": "right"}, who=2)
    with pytest.raises(Tie):
        pairs_of(task(left, right))
    ((chosen, rejected, margin, annotator),) = pairs_of(task(left, right, annotation({"selected": "left"}, who=3)))
    assert (chosen, rejected, annotator) == ("4", "5", "")
    assert margin == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "one",
    [
        annotation({"selected": "left"}, was_cancelled=True),
        {"id": 1, "completed_by": 1, "result": []},
        annotation({"text": ["nice"]}, kind="textarea", name="comment"),
    ],
    ids=["cancelled", "empty", "a comment alone"],
)
def test_an_annotation_without_a_judgment_judges_nothing(one):
    with pytest.raises(Unrated):
        pairs_of(task(one), columns=TWO)


def rated(first: int, second: int, who: int = 1) -> dict[str, Any]:
    found = annotation({"rating": first}, kind="rating", name="q1", to_name="answer1", who=who)
    found["result"].append({"from_name": "q2", "to_name": "answer2", "type": "rating", "value": {"rating": second}})
    return found


def test_choices_and_ratings_are_read():
    assert pairs_of(task(annotation({"choices": ["answer2"]}, kind="choices")), columns=TWO) == [("5", "4", 1.0, "1")]
    with pytest.raises(Tie):
        pairs_of(task(annotation({"choices": ["Tie"]}, kind="choices")), columns=TWO)
    assert pairs_of(task(rated(4, 1)), rating_questions=QUESTIONS) == [("4", "5", 3.0, "1")]
    assert pairs_of(task(rated(5, 1), rated(2, 4, who=2)), rating_questions=QUESTIONS) == [("4", "5", 1.0, "")]


LEFT = annotation({"selected": "left"})
ELSEWHERE = annotation({"selected": "left"}, to_name="txt-1,txt-2")
BY_NAME = {"prompt": "x", "response1": "a", "response2": "b"}
CHOICE = annotation({"choices": ["A"]}, kind="choices", name="other")
RANKER = annotation({"ranker": {"rank": ["a", "b"]}}, kind="ranker", name="order", to_name="answers")
TEXT = annotation({"text": ["4"]}, kind="textarea", name="q1")


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        (task(ELSEWHERE), {}, "no answers: .*set columns = {response1"),
        (task(ELSEWHERE, data=BY_NAME), {}, r"no side: the tags \['txt-1', 'txt-2'\] are not fields.*set columns"),
        (task(LEFT, data={"a": "x"}), {}, "no prompt: .*set columns = {prompt"),
        (task(LEFT, CHOICE), {}, r"several questions: \['other', 'pw'\].*preference"),
        (task(LEFT, annotation({"selected": "right"})), {}, "two responses: annotator '1' answered 'pw' twice; keep one"),
        (task(rated(5, 1), rated(1, 5)), {"rating_questions": QUESTIONS}, "two responses: annotator '1' answered 'q1' twice"),
        (task(annotation({"selected": "up"})), {}, "not a selection: 'up'"),
        ({"id": 1, "data": DATA, "annotations": [{"id": 1}]}, {}, "not an annotation"),
        (task(annotation({"rating": 3}, kind="rating")), {"columns": TWO}, "not a comparison: .*rating_questions"),
        # Responses that the options do not reach are not "unjudged".
        (task(LEFT), {"columns": {"preference": "wp"}}, r"no such question: the responses are to \['pw'\], none to \['wp'\]"),
        (task(LEFT), {"rating_questions": QUESTIONS}, r"no such question: .*none to \['q1', 'q2'\]"),
        (task(RANKER), {"columns": TWO}, r"not a comparison: \['order \(ranker\)'\] cannot be read; use questions of"),
        (task(TEXT), {"rating_questions": QUESTIONS}, r"not a comparison: \['q1 \(textarea\)'\]"),
    ],
)  # fmt: skip
def test_an_ambiguous_task_is_refused_with_the_option_that_decides_it(row, options, reason):
    with pytest.raises(DataError, match=reason):
        pairs_of(row, **options)


# ---------------------------------------------------------------- Argilla

FIELDS = {"instruction": "2+2?", "response_1": "5", "response_2": "4"}
SUBMITTED = {"user_id": "u", "status": "submitted"}
COLUMNS = {"rank": [1, 2], "value": ["response-2", "response-1"]}
RANKED = [{"value": "response-2", "rank": 1}, {"value": "response-1", "rank": 2}]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "r", "fields": FIELDS, "responses": {"ranking": [{"value": RANKED, "user_id": "u"}]}},
        {"fields": FIELDS, "responses": [SUBMITTED | {"values": {"ranking": {"value": RANKED}}}]},
        FIELDS | {"ranking": [SUBMITTED | {"value": RANKED}], "metadata": "{}"},
        FIELDS | {"ranking": {"user_id": ["u"], "status": ["submitted"], "value": [COLUMNS]}},
        FIELDS
        | {"ranking.responses": [RANKED], "ranking.responses.users": ["u"], "ranking.responses.status": ["submitted"]},
    ],
    ids=["version 2", "version 1", "dataset of version 1", "dataset with structs of lists", "dataset of version 2"],
)
def test_every_layout_of_argilla_gives_the_same_ranking(row):
    judged = read_record(row, "argilla", source())
    rows, _ = preference_rows(judged, pairs="max_min", min_margin=0.0)
    assert [(one["chosen"], one["rejected"], one["annotator"]) for one in rows] == [("4", "5", "u")]


def record(question: str, *values: Any, **states: str) -> dict[str, Any]:
    given = [{"value": value, "user_id": f"u{number}"} for number, value in enumerate(values)]
    return {"id": "r", "fields": FIELDS, "responses": {question: [one | states for one in given]}}


def test_equal_ranks_and_a_label_tie_are_ties_and_drafts_do_not_count():
    with pytest.raises(Tie):
        pairs_of(record("ranking", [{"value": "response-1", "rank": 1}, {"value": "response-2", "rank": 1}]))
    with pytest.raises(Tie):
        pairs_of(record("preference", "tie"))
    with pytest.raises(Unrated):
        pairs_of(record("preference", "response_2", status="discarded"))
    assert pairs_of(record("preference", "response_2", "response_2", "tie")) == [("4", "5", pytest.approx(2 / 3), "")]


def test_a_ranking_without_ranks_needs_a_decision():
    bare = record("ranking", ["response_2", "response_1"])
    with pytest.raises(DataError, match=r"ranking without ranks: .*ties cannot be seen; set bare_rankings = true"):
        pairs_of(bare)
    assert pairs_of(bare, bare_rankings=True) == [("4", "5", 1.0, "u0")]


def test_a_ranking_of_other_answers_is_refused():
    others = record("ranking", [{"value": "a", "rank": 1}, {"value": "b", "rank": 2}])
    rule = r"no such answer: the ranking names \['a', 'b'\], the answers are \['response_1'"
    with pytest.raises(DataError, match=rule):
        pairs_of(others, columns={"response1": "response_1", "response2": "response_2"})


def test_a_rating_of_no_named_answer_is_refused():
    with pytest.raises(DataError, match=r"not a comparison: question 'quality' has rating '4'.*rating_questions"):
        pairs_of(record("quality", 4))
    rated = record("quality", 4)
    rated["responses"]["other"] = [{"value": 1, "user_id": "u0"}]
    assert pairs_of(rated, rating_questions={"quality": "response_1", "other": "response_2"}) == [("5", "4", 3.0, "u0")]


@pytest.mark.parametrize(
    "row",
    [
        FIELDS | {"ranking.responses": [RANKED, RANKED], "ranking.responses.users": ["u"]},
        FIELDS | {"ranking.responses": "x"},
        FIELDS | {"ranking": {"user_id": ["u"], "value": 3}},
        {"fields": FIELDS, "responses": [3]},
        {"fields": FIELDS, "responses": {"ranking": [{"value": {"rank": [1], "value": ["a", "b"]}}]}},
    ],
)
def test_responses_of_unequal_length_or_kind_are_malformed(row):
    with pytest.raises(DataError, match=r"not responses|not a response"):
        read_record(row, "argilla", source())


# ---------------------------------------------------------------- as sources


def test_an_export_is_a_source_whose_ties_and_malformed_records_are_reported(tmp_path):
    def about(number: int, *annotations: dict[str, Any]) -> dict[str, Any]:
        return task(*annotations, data=DATA | {"prompt": f"{number}+2?"})

    rows = [about(number, annotation({"selected": "left"}, who={"email": "jo@example.com"})) for number in range(18)]
    rows += [about(18, annotation({"selected": "left"}), annotation({"selected": "right"}, who=2)), about(19)]
    path = tmp_path / "project-1.json"
    path.write_text(json.dumps([*rows, about(20, annotation({"selected": "up"}))]))
    report = DropReport()
    config = Files(sources=({"name": "desk", "path": str(path), "use": {"preferences": 1.0}},))
    tables, _ = make_tables(config, seed=1, report=report)
    pairs = [*tables.preferences, *tables.eval_preferences]
    assert len(pairs) == 18 and {pair.chosen[0].content for pair in pairs} == {"4"}
    assert {pair.annotator for pair in pairs} == {pairs[0].annotator} and "jo" not in pairs[0].annotator
    assert report.counts() == {"malformed": 1, "tie": 1, "not judged": 1}
