"""Every column of a row, and every key of a turn, is read, refused, or listed as not read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_core.config.data import Columns
from rlhf_core.data.columns import Reading, detect
from rlhf_core.data.formats import convert, convert_all
from rlhf_core.errors import DataError
from rlhf_core.types import Message

U, A = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
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
        ({"prompt": [U], "reward_model": {"style": "rule", "ground_truth": "4"}, "extra": {"n": 1}}, ["extra", "reward_model.style"]),
        ({"prompt": "2+2?", "label": "4", "reward_model": {"ground_truth": "5"}}, ["reward_model"]),
        ({"prompt": "2+2?", "response1": "4", "response2": "5", "preference": "A", "why": "x", "annotator": "jo"}, ["why"]),
        ({"chosen": [U, A], "rejected": [U, A | {"content": "5"}], "chosen_rating": 4, "rejected_rating": 2, "score": 1}, ["score"]),
    ],
)  # fmt: skip
def test_what_is_not_read_is_listed(row: dict[str, Any], unread: list[str]) -> None:
    reading = Reading(row, Columns())
    contents = convert_all(reading, detect(reading), coding="auto", ranking_pairs="max_min")
    assert list(contents[0].unread) == unread


def test_a_column_that_the_profile_names_as_prompt_goes_before_an_instruction() -> None:
    row = {"instruction": "Add.", "task": "2+2?", "output": "4"}
    assert convert(Reading(row, Columns(prompt="task")), "alpaca").prompt == (Message("user", "2+2?"),)


def test_columns_have_the_names_of_the_formats_and_those_left_out_their_own() -> None:
    row = {"instruction": "2+2?", "output": "4", "prompt": "old", "meta": {"answer": {"value": "4"}}}
    names = Columns(prompt="instruction", completion="output", label="meta.answer.value")
    reading = Reading(row, names)
    assert dict(reading) == {"prompt": "2+2?", "completion": "4", "label": "4", "meta": row["meta"]}
    assert "instruction" not in reading
    (content,) = convert_all(reading, "prompt_completion", coding="auto", ranking_pairs="max_min")
    assert (content.prompt[0].content, content.label, content.unread) == ("2+2?", "4", ("prompt",))


@pytest.mark.parametrize("name", ["query", "prompt.text"])
def test_a_mapped_column_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(DataError, match=f"no such column: '{name}'; the row has"):
        Reading({"prompt": "x"}, Columns(prompt=name))
