"""Rows in forms that are not read are refused with the function that reads them, which works when it is pasted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipelines.flows.graph import reward_functions
from rlhf_core.config.data import Files, Source
from rlhf_core.data.columns import detect
from rlhf_core.data.files import make_tables
from rlhf_core.data.inspection import inspect
from rlhf_core.data.limits import DropReport
from rlhf_core.data.row_functions import UnknownForm
from rlhf_core.data.sources import LEFT_OUT, read
from rlhf_core.errors import DataError
from stages.prepare_data import PrepareDataConfig

ASK = [{"role": "user", "content": "2+2?"}]


def said(text: str) -> list[dict[str, str]]:
    return [*ASK, {"role": "assistant", "content": text}]


def source(folder: Path, rows: list[Any], use: str = "preferences", **options: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": "s", "path": str(folder / "rows.jsonl"), "use": {use: 1.0}} | options


def tables_of(one: dict[str, Any], **config: Any) -> tuple[dict[str, list[Any]], DropReport]:
    report = DropReport()
    tables, _ = make_tables(Files(sources=[one], **config), seed=0, report=report)
    named = tables.named()
    return {name: [*named[name], *named[f"eval_{name}"]] for name in ("demonstrations", "preferences", "feedback", "prompts")}, report  # fmt: skip


def paste(message: str, folder: Path, decisions: dict[str, str]) -> str:
    """The function in an error, with the decisions of its user, as the option of the source."""
    assert 'give the source function = "rows.py:to_row" and no `columns`' in message
    code = message.partition("\n\n")[2]
    assert len(code.splitlines()) <= 5 and code.startswith("def to_row(row):\n")
    for name, value in decisions.items():
        assert re.search(rf"first replace .*\b{name}\b", message)
        code = re.sub(rf"\b{name}\b", value, code)
    (folder / "rows.py").write_text(code)
    return f"{folder}/rows.py:to_row"


def read_with_paste(folder: Path, rows: list[Any], use: str, decisions: dict[str, str]) -> tuple[dict[str, list[Any]], DropReport]:  # fmt: skip
    one = source(folder, rows, use)
    with pytest.raises(DataError, match=r"data\.sources\[s\] = '.*rows\.jsonl:1'.*the row has \[") as refused:
        tables_of(one)
    return tables_of(one | {"function": paste(str(refused.value), folder, decisions)})


def sides(**columns: Any) -> dict[str, Any]:
    return {"question": "2+2?", "answer_a": "5", "answer_b": "4"} | columns


def scored(*answers: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"response": text, "overall_score": score, "model": "m"} for text, score in answers]


FIRST = {"FIRST_IS_BETTER": "said < 0", "TIE": "said == 0"}
RANKS = [{"answer": "5", "rank": 2}, {"answer": "4", "rank": 1}, {"answer": "6", "rank": 3}]
PAIRS: list[tuple[dict[str, Any], dict[str, str], tuple[str, str, float]]] = [
    (sides(winner="b"), {}, ("4", "5", 0.0)),
    (sides(winner="answer_b"), {}, ("4", "5", 0.0)),
    (sides(winner="answer_a"), {}, ("5", "4", 0.0)),
    ({"prompt": "2+2?", "OutputA": "5", "OutputB": "4", "preferred": "B", "model_a": "x", "model_b": "y"}, {}, ("4", "5", 0.0)),
    ({"prompt": "2+2?", "response1": "5", "response2": "4", "preference": "response2"}, {}, ("4", "5", 0.0)),
    ({"prompt": "2+2?", "response_0": "5", "response_1": "4", "preference": "second"}, {}, ("4", "5", 0.0)),
    ({"conversation_a": said("5"), "conversation_b": said("4"), "winner": "model_b", "model_a": "x"}, {}, ("4", "5", 0.0)),
    # The columns of SHP and of HelpSteer3, whose numbers only the user knows.
    ({"post_id": "1", "history": "2+2?", "human_ref_A": "5", "human_ref_B": "4", "labels": 0, "score_A": 1, "score_B": 3},
     {"FIRST_IS_BETTER": "said == 1", "TIE": "False"}, ("4", "5", 0.0)),
    ({"context": ASK, "response1": "5", "response2": "4", "overall_preference": 2, "domain": "math"}, FIRST, ("4", "5", 0.0)),
    ({"prompt": "2+2?", "answers": RANKS, "turns": 2}, {}, ("4", "6", 0.0)),
    ({"instruction": "2+2?", "completions": scored(("5", "2"), ("4", 9.5), ("six", 3))}, {}, ("4", "5", 7.5)),
    ({"prompt": "2+2?", "completions": ["5", "4", "6"], "ratings": [1, 5, 3]}, {}, ("4", "5", 4.0)),
    ({"prompt": "2+2?", "responses": ["5", "4"], "ranks": [2, 1]}, {}, ("4", "5", 0.0)),
    ({"prompt": "2+2?", "responses": ["5", "4"], "rankings": [1, 2]}, {"SIGN": "-1"}, ("4", "5", 0.0)),
    ({"prompt": "2+2?", "chosen": "4", "rejected": "5", "chosen_rating": 4, "rejected_rating": 1.5}, {}, ("4", "5", 2.5)),
    ({"query": "2+2?", "better": "4", "worse": "5"}, {}, ("4", "5", 0.0)),
    ({"data": {"q": "2+2?", "one": "5", "two": "4"}, "annotations": [
        {"was_cancelled": True, "result": [{"type": "pairwise", "value": {"selected": "left"}}]},
        {"result": [{"type": "pairwise", "value": {"selected": "right"}}, {"type": "textarea", "value": {}}]}]},
     {"PROMPT": "q", "LEFT": "one", "RIGHT": "two"}, ("4", "5", 0.0)),
    ({"fields": {"q": "2+2?", "one": "5", "two": "4"}, "responses": {"best": [
        {"value": "two", "status": "submitted"}, {"value": "one", "status": "draft"}]}},
     {"PROMPT": "q", "QUESTION": "best", "FIRST": "one", "SECOND": "two"}, ("4", "5", 0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("row", "decisions", "expected"), PAIRS)
def test_the_function_of_the_error_makes_the_pair(tmp_path, row, decisions, expected):
    tables, report = read_with_paste(tmp_path, [row], "preferences", decisions)
    (pair,) = tables["preferences"]
    assert pair.prompt[0].content == "2+2?" and len(pair.prompt) == 1
    assert (pair.chosen[0].content, pair.rejected[0].content, pair.margin) == expected
    assert not report.drops
    assert inspect(Source(**source(tmp_path, [row]))).function.startswith("give the source function")


def test_what_only_the_user_knows_stops_the_function_until_it_is_replaced(tmp_path):
    row = sides(winner=1)
    with pytest.raises(DataError, match="first replace FIRST_IS_BETTER, TIE, which only you know") as refused:
        tables_of(source(tmp_path, [row]))
    one = source(tmp_path, [row], function=paste(str(refused.value), tmp_path, {}))
    with pytest.raises(DataError, match="the function failed: NameError: name 'FIRST_IS_BETTER' is not defined"):
        tables_of(one)


def test_ties_are_left_out_and_an_unknown_verdict_is_malformed(tmp_path):
    rows = [sides(winner="a"), sides(winner="tie", question="3+3?"), sides(winner="both", question="4+4?")]
    one = source(tmp_path, rows)
    with pytest.raises(DataError) as refused:
        tables_of(one)
    one["function"] = paste(str(refused.value), tmp_path, {})
    tables, report = tables_of(one, max_bad_fraction=0.5)
    assert [row.chosen[0].content for row in tables["preferences"]] == ["5"]
    assert sorted((drop.origin.line, drop.reason) for drop in report.drops) == [
        (2, LEFT_OUT),
        (3, "malformed: the function failed: KeyError: 'both'"),
    ]


@pytest.mark.parametrize(
    ("rows", "decisions", "good"),
    [
        ([{"thumbs": "up"}, {"thumbs": "down"}, {"thumbs": None}], {}, {"0": True, "1": False}),
        ([{"thumbs": "Thumbs-Up"}, {"thumbs": "Thumbs-Down"}, {"thumbs": ""}], {}, {"0": True, "1": False}),
        ([{"thumbs": 1}, {"thumbs": -1}], {"UP": "1", "DOWN": "-1"}, {"0": True, "1": False}),
        ([{"reward": 0.5}, {"reward": -2}], {"THRESHOLD": "0"}, {"0": True, "1": False}),
    ],
)
def test_the_function_of_the_error_makes_feedback(tmp_path, rows, decisions, good):
    given = [{"prompt": f"q {n}", "completion": f"{n}"} | row for n, row in enumerate(rows)]
    tables, _ = read_with_paste(tmp_path, given, "preferences", decisions)
    assert {row.answer[0].content: row.desirable for row in tables["feedback"]} == good
    with pytest.raises(DataError, match="an answer with a thumb or a reward: it is not read"):
        tables_of(source(tmp_path, given, "demonstrations"))  # a bad answer is not imitated


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({"Question ": "2+2?", "reply": "4"}, ""),
        ({"dialogue": said("4"), "id": 7}, ""),
        ({"prompt": ASK, "reward_model": {"style": "rule", "ground_truth": "4"}}, "4"),
    ],
)
def test_the_function_of_the_error_gives_columns_the_names_of_a_known_form(tmp_path, row, label):
    tables, _ = read_with_paste(tmp_path, [row], "prompts", {})
    (prompt,) = tables["prompts"]
    assert (prompt.messages[0].content, prompt.label) == ("2+2?", label)


@pytest.mark.parametrize(
    ("row", "decisions"),
    [
        ({'my "question"': "2+2?", "answer \\t'x' 1": "5", "answer \\t'x' 2": "4", "winner": 'the "model" 2'}, {"PROMPT": r'my \\"question\\"'}),
        ({"question\n": "2+2?", "answer_1": "5", "answer_2": "4", "winner": 2}, {}),
        ({"query": "2+2?", "answers": ["5", "4"], 'my "score"': [1, 2]}, {"SIGN": "-1"}),
    ],
)  # fmt: skip
def test_names_with_quotes_are_quoted(tmp_path, row, decisions):
    decisions = decisions | ({"FIRST_IS_BETTER": "False", "TIE": "False"} if "winner" in row else {})
    tables, _ = read_with_paste(tmp_path, [row], "preferences", decisions)
    (pair,) = tables["preferences"]
    assert [pair.prompt[0].content, pair.chosen[0].content, pair.rejected[0].content] == ["2+2?", "4", "5"]


@pytest.mark.parametrize("verdict", ["worse_b", "not b", "model_a over model_b", "-b"])
def test_a_verdict_that_may_mean_the_reverse_is_left_to_the_user(verdict):
    function = inspect_row(sides(winner=verdict))
    assert "first replace FIRST_IS_BETTER, TIE" in function and "[said]" not in function


def inspect_row(row: dict[str, Any]) -> str:
    with pytest.raises(UnknownForm) as refused:
        detect(row)
    return refused.value.function


def test_lists_of_two_lengths_are_malformed(tmp_path):
    row = {"prompt": "2+2?", "responses": ["5", "4", "6"], "scores": [1, 2]}
    with pytest.raises(DataError, match="the function failed: ValueError: zip"):
        read_with_paste(tmp_path, [row], "preferences", {})


def test_a_comparison_takes_answers_and_not_what_is_said_of_them():
    row = sides(
        winner="b",
        rationale_a="It is wrong, since",
        rationale_b="It is right",
        prompt_a="Long " * 9,
        prompt_b="Long " * 8,
    )
    assert '(row.pop("answer_a"), row.pop("answer_b"))' in inspect_row(row)


@pytest.mark.parametrize(
    ("row", "prompt", "kind"),
    [
        ({"output_1": "5", "output_2": "4", "preference": "second"}, "Add\n2+2", "preferences"),
        ({"output": "4", "thumbs": "up"}, "Add\n2+2", "feedback"),
        ({"response": "4"}, "Add\n2+2", "demonstrations"),
    ],
)
def test_the_input_of_an_instruction_stays(tmp_path, row, prompt, kind):
    row = {"instruction": "Add", "input": "2+2", "system": "Be exact."} | row
    use = "demonstrations" if kind == "demonstrations" else "preferences"
    tables, _ = read_with_paste(tmp_path, [row], use, {})
    (made,) = tables[kind]
    turns = made.messages if kind == "demonstrations" else made.prompt
    assert [turn.content for turn in turns[:2]] == ["Be exact.", prompt]


@pytest.mark.parametrize(
    "row", [sides(winner="b", passage="2+2=4"), {"Question": "2+2?", "Reply": "4", "passage": "2+2=4"}]
)
def test_a_function_does_not_leave_out_a_part_of_the_prompt(tmp_path, row):
    with pytest.raises(DataError, match=r"a part of the prompt: \['passage'\] would be left out"):
        read_with_paste(tmp_path, [row], "preferences", {})


def test_a_bad_conversation_is_not_imitated_by_its_function(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q {n}"}, *said("4")[1:]], "thumbs": thumb}
        for n, thumb in enumerate(("up", "down"))
    ]
    tables, _ = read_with_paste(tmp_path, rows, "preferences", {})
    assert {row.prompt[0].content: row.desirable for row in tables["feedback"]} == {"q 0": True, "q 1": False}


@pytest.mark.parametrize(
    "form", [{"messages": [{"role": "user", "content": "2+2?"}, *said("4")[1:]]}, {"question": "2+2?", "answer": "4"}]
)
def test_an_answer_with_a_reward_is_not_imitated_whatever_its_form(tmp_path, form):
    given = source(tmp_path, [form | {"reward": -2}], "preferences")
    with pytest.raises(DataError, match="an answer with a thumb or a reward: it is not read") as refused:
        tables_of(given)
    tables, _ = tables_of(given | {"function": paste(str(refused.value), tmp_path, {"THRESHOLD": "0"})})
    assert [row.desirable for row in tables["feedback"]] == [False]


def test_a_source_with_a_function_gets_the_lines_that_it_lacks_and_no_second_function(tmp_path):
    (tmp_path / "rows.py").write_text("def mine(row):\n    return row\n")
    one = source(
        tmp_path, [{"prompt": "2+2?", "completion": "4", "passage": "2+2=4"}], function=f"{tmp_path}/rows.py:mine"
    )
    with pytest.raises(
        DataError, match=r"let .*rows.py:mine change each row that it returns as these lines do:"
    ) as refused:
        tables_of(one)
    assert 'row["prompt"] = ' in str(refused.value) and "def to_row" not in str(refused.value)


def test_a_pair_with_equal_ratings_is_a_tie_in_its_function(tmp_path):
    rated = {"chosen": "4", "rejected": "5", "chosen_score": 3}
    rows = [{"question": f"{n}?", "rejected_score": n} | rated for n in range(1, 4)]
    tables, report = read_with_paste(tmp_path, rows, "preferences", {})
    assert [row.margin for row in tables["preferences"]] == [2, 1] and [drop.kind for drop in report.drops] == ["tie"]


def test_columns_whose_names_mean_nothing_are_left_to_the_user(tmp_path):
    tables, _ = read_with_paste(tmp_path, [{"a": "2+2?", "b": "4"}], "demonstrations", {"PROMPT": "a", "ANSWER": "b"})
    assert [[turn.content for turn in row.messages] for row in tables["demonstrations"]] == [["2+2?", "4"]]


@pytest.mark.parametrize(
    ("column", "parts"),
    [
        *((name, ["question", name]) for name in ("choices", "Options", "option A", "A.", "b", "hypothesis", "starter_code")),
        *((name, [name, "question"]) for name in ("passage", "document_text", "context", "ctx", "facts", "tables")),
    ],
)  # fmt: skip
def test_the_function_of_the_error_keeps_a_part_of_the_question(tmp_path, column, parts):
    rows = [{"question": f"Which is {number}?", column: [f"{number}"], "answer": "B"} for number in range(9)]
    one = source(tmp_path, rows, "prompts")
    with pytest.raises(
        DataError, match=rf"a part of the prompt: \['{re.escape(column)}'\] would be left out"
    ) as refused:
        tables_of(one)
    tables, _ = tables_of(one | {"function": paste(str(refused.value), tmp_path, {})})
    cells = {"question": "Which is 3?", column: "['3']"}
    asked = {row.messages[0].content: row.label for row in tables["prompts"]}
    assert len(asked) == 9 and asked["\n\n".join(cells[name] for name in parts)] == "B"


def test_the_function_of_the_error_puts_documents_into_the_system_message(tmp_path):
    one = source(tmp_path, [{"messages": said("4"), "documents": [{"text": "2+2=4"}]}], "demonstrations")
    with pytest.raises(DataError, match=r"a part of the prompt: \['documents'\] would be left out") as refused:
        tables_of(one)
    tables, _ = tables_of(one | {"function": paste(str(refused.value), tmp_path, {})})
    assert [turn.role for turn in tables["demonstrations"][0].messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    "extra",
    [
        *({"response": "4"}, {"responses": ["4", "5"]}, {"answer": "4"}, {"chosen": "4"}, {"modelOutput": "4"}),
        {"response_0": "4", "response_1": "5", "better_response_id": 0, "safer_response_id": 1},
        *({"answers": [{"text": "4", "score": 1.0}]}, {"winner": 0}, {"reward_model": {"ground_truth": "4"}}),
    ],
)
def test_a_row_with_answers_is_no_bare_prompt(extra):
    with pytest.raises(UnknownForm, match=r"answers beside a bare prompt: \['.*format = 'prompt'"):
        detect({"prompt": "2+2?"} | extra)


@pytest.mark.parametrize(
    "extra", [{}, {"label": "4"}, {"num_responses": 7, "response": None, "answers": []}, {"source": "x", "level": 3}]
)
def test_a_prompt_with_other_columns_is_a_prompt(extra):
    assert detect({"prompt": "2+2?"} | extra) == "prompt"


def test_choices_of_a_question_are_no_comparison():
    with pytest.raises(UnknownForm, match=r"^(?!two answers)"):
        detect({"query_text": "Which?", "option_a": "4", "option_b": "5", "label": "a"})


# ---------------------------------------------------------------- functions


def test_a_function_gives_a_row_several_rows_or_none(tmp_path):
    (tmp_path / "rows.py").write_text(
        'def split(row):\n    return [{"prompt": one} for one in row["all"]] or None\n\n\ndef odd(row):\n    return "text"\n'
    )
    rows = [{"all": ["a", "b"]}, {"all": []}]
    one = source(tmp_path, rows, "prompts", function=f"{tmp_path}/rows.py:split")
    tables, report = tables_of(one)
    assert sorted(row.messages[0].content for row in tables["prompts"]) == ["a", "b"]
    assert [(drop.origin.line, drop.kind) for drop in report.drops] == [(2, "left out")]
    assert report.rows_read == {"s": 3}
    odd = Source(**one | {"function": f"{tmp_path}/rows.py:odd"})
    assert [record.problem[:14] for record in read(odd)] == ["not a row: str", "not a row: str"]


def test_the_code_of_a_function_is_in_the_key(tmp_path):
    one = source(tmp_path, [], function="rows.py:to_row")
    named = reward_functions(PrepareDataConfig(data=Files(sources=[one])), "prepare_data")
    assert named == {"prepare_data.data.sources[0].function": "rows.py:to_row"}


# ---------------------------------------------------------------- keys of before


def refused_option(**options: Any) -> str:
    with pytest.raises(ValueError, match="is not read any more") as refused:
        Source(name="s", path="rows.jsonl", use={"preferences": 1.0}, **options)
    return str(refused.value)


@pytest.mark.parametrize(
    "options",
    [
        *({"format": name} for name in ("comparison", "ranking", "scored", "ratings", "label_studio", "argilla")),
        *({"columns": {name: "x"}} for name in ("response1", "preference", "answers", "reward", "ranks", "thumbs")),
        *({"preference_coding": "signed"}, {"ranking_pairs": "all"}, {"rating_weights": {"wit": 1.0}}),
        *({"min_margin": 0.5}, {"rating_questions": {"a": "b"}}, {"bare_rankings": True}),
    ],
)
def test_a_key_or_format_of_before_is_refused_with_the_command_that_prints_the_function(options):
    assert "remove it; `rlhf data rows.jsonl` prints the function to paste" in refused_option(**options)


def test_a_column_of_before_is_refused_with_the_function_that_renames_it(tmp_path):
    message = refused_option(columns={"question": "ask", "answer": "said"})
    code = message.partition("\n\n")[2].partition("\n [type")[0]
    (tmp_path / "rows.py").write_text(code)
    one = source(tmp_path, [{"ask": "2+2?", "said": "4"}], "prompts", function=f"{tmp_path}/rows.py:to_row")
    tables, report = tables_of(one)
    assert [(row.messages[0].content, row.label) for row in tables["prompts"]] == [
        ("2+2?", "4")
    ] and not report.not_read["s"]


def test_names_that_are_swapped_or_have_quotes_are_renamed_at_once():
    code = refused_option(columns={"question": "answer", "answer": 'question "x"'}).partition("\n\n")[2]
    made: dict[str, Any] = {}
    exec(code.partition("\n [type")[0], made)
    assert made["to_row"]({"answer": "2+2?", 'question "x"': "4"}) == {"question": "2+2?", "answer": "4"}


def test_the_defaults_of_before_are_read_and_stay_in_the_json():
    given = {"name": "s", "path": "rows.jsonl", "use": {"prompts": 1.0}}
    one = Source(**given, columns={"margin": "", "prompt": "ask"}, preference_coding="auto", ranking_pairs="max_min")
    table = json.loads(one.model_dump_json())
    assert (table["preference_coding"], table["ranking_pairs"], table["columns"]["id"]) == ("auto", "max_min", "")
    assert Source(**table) == one and one.columns.prompt == "ask"
