"""Rows of every format: what is read, by which columns, and what a label means."""

import json
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from rlhf_core.config.data import Columns, Source, Use
from rlhf_core.data.columns import Reading, detect, label_reading, refuse_verdict
from rlhf_core.data.formats import Example, Tie, convert
from rlhf_core.errors import DataError
from rlhf_core.types import Message

# ---------------------------------------------------------------- formats


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


U, A, B = turn("user", "2+2?"), turn("assistant", "4"), turn("assistant", "5")
ASK, GOOD, BAD = (Message("user", "2+2?"),), (Message("assistant", "4"),), (Message("assistant", "5"),)
ADD = (Message("user", "Add.\n2+2?"),)
H = "\n\nHuman: 2+2?\n\nAssistant: "
HH = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: 2+2?\n\nAssistant: "
HH_PROMPT = (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", "2+2?"))
SHARE = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]
PAIR = Example(ASK, GOOD, BAD)


def stepped(steps: list[str], labels: list[float], **answer: tuple[Message, ...]) -> Example:
    return Example(ASK, steps=tuple(steps), step_labels=tuple(labels), judged=True, **answer)


ROWS: list[tuple[str, dict[str, Any], Example]] = [
    ("messages", {"messages": [U, A]}, Example(ASK, GOOD)),
    ("messages", {"messages": [U]}, Example(ASK)),
    ("messages", {"conversations": SHARE}, Example(ASK, GOOD)),
    ("messages", {"messages": [U, A], "label": 4}, Example(ASK, GOOD, label="4")),
    ("text", {"text": "4"}, Example((), GOOD)),
    ("prompt", {"prompt": "2+2?"}, Example(ASK)),
    ("prompt", {"prompt": [U], "label": 4}, Example(ASK, label="4")),
    ("prompt_completion", {"prompt": "2+2?", "completion": "4"}, Example(ASK, GOOD)),
    ("prompt_completion", {"prompt": [U], "completion": [A]}, Example(ASK, GOOD)),
    ("prompt_completion", {"prompt": "2+2?", "completion": "4", "label": "4"}, Example(ASK, GOOD, label="4")),
    ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
    ("preference", {"prompt": [U], "chosen": [A], "rejected": [B], "margin": 2}, Example(ASK, GOOD, BAD, margin=2.0)),
    ("preference", {"prompt": "2+2?", "chosen": [U, A], "rejected": [U, B]}, PAIR),
    ("implicit_preference", {"chosen": [U, A], "rejected": [U, B]}, PAIR),
    ("preference", {"question": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
    ("preference", {"input": "2+2?", "chosen": [A], "rejected": [B]}, PAIR),
    ("preference", {"messages": [U], "chosen": A, "rejected": B}, PAIR),
    ("preference", {"instruction": "Add.", "input": "2+2?", "chosen": "4", "rejected": "5"}, Example(ADD, GOOD, BAD)),
    ("preference", {"prompt": "2+2?", "question": "?", "chosen": "4", "rejected": "5"}, PAIR),
    ("preference", {"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "chosen": "4", "rejected": "5"}, PAIR),
    ("preference", {"prompt": "2+2?", "chosen": H + "4", "rejected": H + "5"}, PAIR),
    ("implicit_preference", {"question": "2+2?", "chosen": [U, A], "rejected": [U, B]}, PAIR),
    ("alpaca", {"instruction": "2+2?", "output": "4", "input": "", "history": []}, Example(ASK, GOOD)),
    ("alpaca", {"instruction": "Add.", "output": "4", "input": "2+2?"}, Example(ADD, GOOD)),
    ("alpaca", {"instruction": "Add.", "output": "4", "input": "2+2?", "prompt": "Add.\n2+2?\n4"}, Example(ADD, GOOD)),
    (
        "alpaca",
        {"instruction": "2+2?", "output": "4", "input": None, "history": [["Hi", "Hello."]]},
        Example(HH_PROMPT, GOOD),
    ),
    ("prompt", {"prompt": json.dumps([U]), "label": 4}, Example(ASK, label="4")),
    ("messages", {"messages": json.dumps([U, A])}, Example(ASK, GOOD)),
    ("hh", {"chosen": HH + "4", "rejected": HH + "5"}, Example(HH_PROMPT, GOOD, BAD)),
    ("stepwise", {"prompt": "2+2?", "completions": ["4"], "labels": [True]}, stepped(["4"], [1.0], chosen=GOOD)),
    (
        "stepwise",
        {"prompt": "2+2?", "completions": ["4", "so 5"], "labels": [True, False]},
        stepped(["4", "so 5"], [1.0, 0.0], rejected=(Message("assistant", "4\nso 5"),)),
    ),
    (
        "stepwise",
        {"prompt": "2+2?", "completions": ["4", "so 5"], "labels": [1, "0.75"]},
        stepped(["4", "so 5"], [1.0, 0.75], chosen=(Message("assistant", "4\nso 5"),)),
    ),
    (
        "question_answer",
        {"question": "2+2?", "answer": "it is\n#### 1,234"},
        Example(ASK, (Message("assistant", "it is\n#### 1,234"),), label="1234"),
    ),
    ("question_answer", {"question": "2+2?", "answer": "4"}, Example(ASK, GOOD, label="4")),
]


@pytest.mark.parametrize(("name", "row", "content"), ROWS)
def test_each_format_is_detected_and_read(name, row, content):
    assert detect(row) == name
    assert read_as(row, name) == content


@pytest.mark.parametrize("label", [False, "False", " 0 ", -1, "undesirable", "rejected", "No", "harmful"])
@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("prompt_completion", {"prompt": [U], "completion": [B]}),
        ("unpaired_preference", {"prompt": [U], "completion": [B]}),
        ("messages", {"messages": [U, B]}),
        ("alpaca", {"instruction": "2+2?", "output": "5"}),
        ("question_answer", {"question": "2+2?", "answer": "5"}),
    ],
)
def test_a_bad_answer_is_none_to_imitate_in_any_format(name, row, label):
    content = convert(row | {"label": label}, name, labels="verdict")
    assert (content.chosen, content.rejected, content.judged, content.label) == ((), BAD, True, "")


BAD_ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"messages": []}, "not turns"),
    ("messages", {"messages": [{"text": "x"}]}, "not a turn"),
    ("messages", {"messages": [turn("wizard", "x")]}, "unknown role: 'wizard'"),
    ("messages", {"messages": [turn("user", " "), A]}, "empty turn: role user"),
    ("messages", {"messages": [U, turn("assistant", 3)]}, "not text: content is int"),
    ("messages", {"text": "x"}, "missing column: 'conversations'"),
    ("prompt_completion", {"prompt": "2+2?"}, "missing column: 'completion'"),
    ("prompt_completion", {"prompt": "2+2?", "completion": [U]}, "answer is not the assistant's"),
    ("prompt", {"prompt": [U, A]}, "prompt ends with the assistant"),
    ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": "4"}, "chosen equals rejected"),
    ("preference", {"prompt": "x", "chosen": "4", "rejected": "5", "margin": "wide"}, "not a number"),
    ("implicit_preference", {"chosen": "Four", "rejected": "Five"}, "empty turn|no common prompt"),
    ("implicit_preference", {"chosen": [U, A], "rejected": [U]}, "no answer"),
    ("implicit_preference", {"question": "3+3?", "chosen": [U, A], "rejected": [U, B]}, "two prompts: .*'question'"),
    ("preference", {"prompt": "x", "chosen": "4", "rejected": "5", "margin": -0.5}, "negative margin: margin is -0.5"),
    ("alpaca", {"instruction": "x", "output": "4", "history": ["Hi"]}, "not a history"),
    ("implicit_preference", {"chosen": [A], "rejected": [B]}, "no common prompt"),
    ("hh", {"chosen": "Hi", "rejected": "Ho"}, "not a transcript"),
    ("unpaired_preference", {"prompt": "x", "completion": "4", "label": "maybe"}, "not true or false"),
    ("stepwise", {"prompt": "x", "completions": ["4"], "labels": []}, "lists of one length"),
    ("stepwise", {"prompt": "x", "completions": ["4"], "labels": [1.5]}, "not a probability: label is 1.5"),
    ("stepwise", {"prompt": "x", "completions": ["4"], "labels": ["maybe"]}, "not true or false"),
    ("stepwise", {"prompt": "x", "completions": ["4"], "labels": [10**400]}, "not true or false"),
    ("preference", {"prompt": "x", "chosen": "4", "rejected": "5", "margin": -(10**400)}, "not a number: margin"),
    ("prompt", {"prompt": "half \ud83d"}, "not text: user has what UTF-8 cannot hold"),
    ("prompt", {"prompt": "x", "label": "half \ud83d"}, "not text: label has what UTF-8 cannot hold"),
    ("prompt", {"prompt": "x", "label": {"a": ["\ud83d"]}}, "not text: label has what UTF-8 cannot hold"),
    ("prompt", {"prompt": "x", "label": [float("nan")]}, "not JSON: label"),
    ("prompt", {"prompt": "x", "label": b"4"}, "not JSON: label: bytes"),
    ("prompt", {"prompt": "x", "label": {"cost": Decimal("0.10")}}, "not JSON: label: Decimal"),
    ("messages", {"messages": [{"role": ["user"], "content": "x"}]}, "not text: role is list"),
    (
        "messages",
        {"messages": [U | {"tool_calls": [{"function": {"name": "add"}}]}, A]},
        "only the assistant calls tools",
    ),
    ("messages", {"messages": [U, A | {"function_call": {"arguments": "{}"}}]}, "function_call: a call needs the name"),
]


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ({"inputs": ["2"], "outputs": ["4"]}, '{"inputs": ["2"], "outputs": ["4"]}'),
        (["assert f(1) == 2"], '["assert f(1) == 2"]'),
        ({"name": "Zoë", "old": None, "day": date(2024, 2, 29)}, '{"name": "Zoë", "old": null, "day": "2024-02-29"}'),
        (True, "true"),
        (4, "4"),
        (0.5, "0.5"),
        (1e-05, "0.00001"),
        (float("nan"), ""),
        (Decimal("12.50"), "12.50"),
        (datetime(2024, 2, 29, 12), "2024-02-29T12:00:00"),
        (" 4 ", " 4 "),
        (None, ""),
    ],
)
def test_a_label_keeps_its_json(label, text):
    assert convert({"prompt": "2+2?", "label": label}, "prompt").label == text
    assert convert({"messages": [U, A], "label": label}, "messages").label == text


def read_as(row: dict[str, Any], name: str) -> Example:
    return replace(convert(row, name), conversational=False, unread=())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("prompt", {"prompt": "2+2?"}),
        ("messages", {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}),
        ("preference", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
        ("question_answer", {"question": "2+2?", "answer": "4"}),
        ("messages", {"messages": [turn("system", "Add. "), U, A]}),
    ],
)
def test_the_system_of_a_row_is_its_system_message(name, row):
    content = read_as(row | {"system": "Add."}, name)
    assert [message.role for message in content.prompt] == ["system", "user"]
    assert content.prompt[0].content.strip() == "Add."
    without = read_as(row | {"system": " "}, name)
    assert without == read_as(row | {"system": None}, name) == read_as(row, name)


def test_two_system_messages_that_differ_are_refused():
    with pytest.raises(DataError, match="two system messages: the column system and the first turn differ"):
        read_as({"messages": [turn("system", "Add."), U, A], "system": "Subtract."}, "messages")
    with pytest.raises(DataError, match="not text: system is list"):
        read_as({"prompt": "2+2?", "system": ["Add."]}, "prompt")


def test_tool_calls_beside_the_turns_are_refused_and_empty_ones_are_none():
    for value in ([{"type": "function"}], '[{"type": "function"}]', {"name": "add"}):
        with pytest.raises(DataError, match="tool_calls: a row has them beside its turns; write them into"):
            read_as({"prompt": "2+2?", "completion": "4", "tool_calls": value}, "prompt_completion")
    for name in ("tools", "tool_calls", "function_call"):
        for empty in (None, "", "[]", " null ", [], {}):
            row = {"prompt": "2+2?", "completion": "4", name: empty}
            assert read_as(row, "prompt_completion") == Example(ASK, GOOD)


@pytest.mark.parametrize(("name", "row", "reason"), BAD_ROWS)
def test_a_bad_row_says_what_is_wrong(name, row, reason):
    with pytest.raises(DataError, match=reason):
        convert(row, name)


def test_columns_of_no_format_are_refused_with_the_known_ones():
    rule = r"unknown columns: none of the forms \['alpaca', 'hh', .*; the row has \['foo'\]"
    with pytest.raises(DataError, match=rule):
        detect({"foo": 1})


@pytest.mark.parametrize("more", [{}, {"post": "2+2?"}, {"title": "Sums", "system": "Add."}])
@pytest.mark.parametrize(("chosen", "rejected"), [("2+2? 4", "2+2? 5"), ([A], [B]), (HH + "4", "5")])
def test_no_prompt_is_made_of_what_two_answers_have_in_common(chosen, rejected, more):
    with pytest.raises(DataError, match="no prompt: chosen and rejected are answers alone"):
        detect({"chosen": chosen, "rejected": rejected, **more})
    said = {"chosen": "2+2? 4", "rejected": "2+2? 5"}  # the format is set
    assert read_as(said, "implicit_preference") == PAIR


def test_an_empty_column_does_not_decide_the_format():
    assert detect({"prompt": "2+2?", "completion": None}) == "prompt"


def test_a_pair_with_two_scores_has_their_difference_as_margin_and_equal_scores_are_a_tie():
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "score_chosen": 8.0, "score_rejected": "6.5"}
    assert read_as(pair, "preference").margin == 1.5
    assert read_as(pair | {"margin": 3}, "preference").margin == 3.0
    assert read_as(pair | {"score_rejected": "N/A"}, "preference").margin == 0.0
    with pytest.raises(Tie):
        convert(pair | {"score_rejected": 8}, "preference")
    with pytest.raises(DataError, match="chosen is rated below rejected: score_chosen is 8, score_rejected is 9"):
        convert(pair | {"score_rejected": 9}, "preference")
    for bad in (True, "inf", "best"):
        with pytest.raises(DataError, match="not a number: a score is"):
            convert(pair | {"score_rejected": bad}, "preference")


# ---------------------------------------------------------------- columns

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": [U, A], "id": 0, "empty": None, "none": "", "rest": []}, ["id"]),
        ({"messages": [U | {"name": "Zoë"}, A | {"prefix": True, "audio": None}]}, ["messages[].name", "messages[].prefix"]),
        ({"messages": json.dumps([U, A | {"refusal": "no"}])}, ["messages[].refusal"]),
        ({"messages": [U, A | {"from": "gpt", "value": "5"}]}, ["messages[].from", "messages[].value"]),
        ({"messages": [U, A | {"tool_calls": [CALL | {"index": 3}]}]}, ["messages[].tool_calls[].index"]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?", "cache": 1}]}, A]},
            ["messages[].content[].cache"],
        ),
        ({"prompt": "2+2?", "completion": "4", "reasoning": "I add."}, ["reasoning"]),
        ({"instruction": "2+2?", "output": "4", "prompt": "2+2? 4"}, ["prompt"]),
        ({"question": "2+2?", "answer": "4", "label": "4", "hint": "add"}, ["hint", "label"]),
        ({"prompt": "2+2?", "question": "2+2?", "chosen": "4", "rejected": "5"}, ["question"]),
        ({"chosen": [U, A], "rejected": [U, A | {"content": "5"}], "score_chosen": 4, "score_rejected": 2, "annotator": "jo", "score": 1}, ["score"]),
    ],
)  # fmt: skip
def test_what_is_not_read_is_listed(row, unread):
    reading = Reading(row, Columns())
    assert list(convert(reading, detect(reading)).unread) == unread


def test_a_column_that_the_profile_names_as_prompt_goes_before_an_instruction():
    row = {"instruction": "Add.", "task": "2+2?", "output": "4"}
    assert convert(Reading(row, Columns(prompt="task")), "alpaca").prompt == (Message("user", "2+2?"),)


def test_columns_have_the_names_of_the_formats_and_those_left_out_their_own():
    row = {"instruction": "2+2?", "output": "4", "prompt": "old", "gold": "4", "meta": 1}
    names = Columns(prompt="instruction", completion="output", label="gold")
    reading = Reading(row, names)
    assert dict(reading) == {"prompt": "2+2?", "completion": "4", "label": "4", "meta": 1}
    assert "instruction" not in reading
    content = convert(reading, "prompt_completion")
    assert (content.prompt[0].content, content.label, content.unread) == ("2+2?", "4", ("meta", "prompt"))


def test_a_mapped_column_that_is_not_there_is_named():
    with pytest.raises(DataError, match="no such column: 'query'; the row has"):
        Reading({"prompt": "x"}, Columns(prompt="query"))


# ---------------------------------------------------------------- labels

LEARN, COMPARE, SAMPLE = {"demonstrations": 1.0}, {"preferences": 1.0}, {"prompts": 1.0}


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
        (("👍🏽", "👎🏿", "👍️", "👎"), "verdict"),  # in colors, and with the sign for emoji
        (("1", "2", "0"), "answer"),
        ((1.0, 0.5), "answer"),
        (("Paris", "4", "Rome"), "answer"),
        (("x",) * 20, "answer"),
        (("Paris", "up", "Rome"), "answer"),
        (({"a": 1}, [1]), "answer"),
        ((None, ""), "answer"),
        ((True, False, "maybe"), "verdict"),
        ((True, "maybe"), "verdict"),
        (("4", "5", "true"), "answer"),
    ],
)
def test_all_labels_decide(labels, reading):
    for order in (labels, labels[::-1]):
        assert label_reading(source(), "messages", rows(*order)) == reading


@pytest.mark.parametrize(
    "labels",
    [
        *((0, 1), ("1", "1"), ("1.0", "0.0"), (-1, 1), ("yes", "no") * 4, ("ok", "toxic") * 4),
        *(("fine", "odd"), ("bad",) * 8, ("good", "bad", "neutral") * 3, ("correct", "incorrect", "4", "5") * 2),
        *(("Thumbs-Up", "thumbs down"), ("thumbsup", "thumbsdown", None), ("upvoted",), ("Up", "down", "none")),
    ],
)
def test_labels_that_can_be_read_both_ways_need_a_word_of_the_profile(labels):
    with pytest.raises(DataError, match=r"sources\[s\].label_coding = 'auto': the labels are .*; set it to 'verdict'"):
        label_reading(source(), "prompt_completion", rows(*labels))
    for coding in ("verdict", "answer"):
        assert label_reading(source(label_coding=coding), "messages", rows(*labels)) == coding
    assert label_reading(source(format="unpaired_preference"), "unpaired_preference", rows(*labels)) == "verdict"
    assert label_reading(source(format="prompt_completion"), "prompt_completion", rows(*labels)) == "answer"


def test_where_only_one_reading_is_of_use_it_is_taken():
    for labels in ((0, 1), ("good", "bad", "neutral") * 3):
        assert label_reading(source(SAMPLE), "prompt_completion", rows(*labels)) == "answer"
    assert label_reading(source(SAMPLE), "prompt_completion", rows(True, False)) == "verdict"
    with pytest.raises(DataError, match="the labels are false, true"):  # a KTO table, or questions of yes and no
        label_reading(source(SAMPLE), "prompt_completion", rows("True", "False"))
    assert label_reading(source(COMPARE), "prompt_completion", rows(0, 1)) == "verdict"
    assert label_reading(source(), "prompt", rows(True, False)) == "answer"  # there is no answer to judge


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("is_toxic", True), ("harmful", True), ("isUnsafe", True), ("rejected", True), ("answer_wrong", True),
        ("flagged", True), ("has_errors", True), ("is_false", True), ("jailbreaking", True), ("unhelpfulness", True),
        ("incorrectness", True), ("inaccurate", True), ("not_correct", True), ("lessHelpful", True), ("helpfulness", False),
        ("", False), ("good", False), ("is_correct", False), ("no_help", False), ("label", False),
        ("not_toxic", False), ("error_free", False), ("like_dislike", False),
    ],
)  # fmt: skip
def test_true_in_a_column_that_says_what_is_bad_is_no_praise(name, refused):
    column = source(label_coding="verdict", columns={"label": name})
    assert label_reading(column, "messages", rows("desirable", "undesirable")) == "verdict"  # words say it themselves
    for labels in ((True, False), ("yes", "no"), (1, 0), (1, -1, None), (True, False, "unknown")):
        if not refused:
            assert label_reading(column, "messages", rows(*labels)) == "verdict"
            continue
        with pytest.raises(
            DataError, match=rf"columns\.label = '{name}': the name says what is bad, and .*; write 'desirable'"
        ):
            label_reading(column, "messages", rows(*labels))


def test_a_verdict_among_expected_answers_is_refused():
    with pytest.raises(DataError, match="mixed labels: True is a verdict, where most labels are expected answers"):
        refuse_verdict({"label": True}, source())
    refuse_verdict({"label": True}, source(label_coding="answer"))
    refuse_verdict({"label": "4"}, source())
