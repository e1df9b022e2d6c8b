"""Turns with tool calls keep them as templates read them; what cannot be kept exactly is refused."""

import json

import pytest

from rlhf_core.data.formats import convert
from rlhf_core.data.turns import calls_tools, tools_of, turns_of
from rlhf_core.errors import DataError
from rlhf_core.types import Message

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
FIELDS = json.dumps({"tool_calls": [CALL]})
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
        },
        {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"a": 2, "b": 3}'}},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 3}}'},
    ],
)
def test_every_spelling_of_a_call_is_the_same_turn(turn):
    (message,) = turns_of([turn], role="")
    assert message == Message("assistant", "", FIELDS)
    assert calls_tools(message) and not calls_tools(Message("assistant", "Hi"))


def test_a_result_keeps_its_name_and_the_call_that_it_answers():
    result = {"role": "tool", "content": "5", "name": "add", "tool_call_id": "c1"}
    assert turns_of([result], role="") == (Message("tool", "5", '{"name": "add", "tool_call_id": "c1"}'),)
    assert turns_of([{"from": "observation", "value": "5"}], role="") == (Message("tool", "5"),)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": ""}}]},
            "needs the name of a function",
        ),
        ({"role": "assistant", "content": "", "tool_calls": "[oops"}, "tool_calls: not JSON"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": None}}]},
            "has nulls, which tables write for keys that a row has not; store it as JSON text",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "[1]"}]},
            "must be an object",
        ),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "only the assistant calls tools"),
        ({"from": "function_call", "value": "not json"}, "function_call: not JSON"),
        ({"role": "assistant", "content": "", "tool_calls": '[{"name": "a", "name": "b"}]'}, "'name' more than once"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a part of type 'image_url'"),
        ({"role": "assistant", "content": "x", "weight": 0}, "weight: a turn of the assistant has 0; all answers"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, "weight: a turn of the assistant has 0.5"),
        ({"role": "assistant", "content": "x", "train": False}, "train: a turn of the assistant has False"),
        ({"from": "gpt", "value": "x", "loss_mask": [0, 1]}, "loss_mask: a turn of the assistant has"),
        ({"role": "user", "content": "x", "train": True}, "train: a turn of the user has True"),
        ({"role": "user", "content": "x", "thinking": "y"}, "reasoning: a turn that is not the assistant's"),
        ({"role": "assistant", "content": "<think>z</think>x", "reasoning": "y"}, "reasoning: .* or one has it twice"),
        ({"role": "assistant", "content": "x", "reasoning": "y", "thinking": "z"}, "reasoning: .* or one has it twice"),
    ],
)
def test_a_turn_that_cannot_be_kept_exactly_is_refused(turn, reason):
    with pytest.raises(DataError, match=reason):
        turns_of([turn], role="")


THOUGHT = Message("assistant", "<think>\nI add.\n</think>\n\n5")


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "assistant", "content": "5", "reasoning_content": "I add."}, THOUGHT),
        ({"role": "assistant", "content": "5", "thinking": "I add.\n", "reasoning": None}, THOUGHT),
        ({"from": "gpt", "value": "5", "reasoning": "I add."}, THOUGHT),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "I add."}, {"type": "text", "text": "5"}]},
            THOUGHT,
        ),
        ({"role": "developer", "content": "Add."}, Message("system", "Add.")),
        ({"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}, Message("user", "2+3?")),
        ({"role": "user", "content": ["2+3?"], "weight": 0, "train": None}, Message("user", "2+3?")),
        ({"role": "assistant", "content": "5", "weight": 1, "train": "true", "loss_mask": None}, Message("assistant", "5")),
    ],
)  # fmt: skip
def test_what_a_turn_holds_beside_its_text_is_read(turn, message):
    assert turns_of([turn], role="") == turns_of(json.dumps([turn]), role="user") == (message,)


@pytest.mark.parametrize(
    "text",
    [
        '[{"role": "admin", "right": "read"}] what may I do?',
        '[{"role": "admin", "content": "x"}]',
        '[{"role": ["user"], "content": "x"}]',
        '[{"role": "user", "content": "x"}] Mend it.',
        "[sic]",
        '[{"name": "Zoë"}]',
    ],
)
def test_text_that_is_not_turns_stays_text(text):
    assert turns_of(text, role="user") == (Message("user", text),)


def test_turns_as_python_shows_them_are_refused():
    for text in ("[{'role': 'user', 'content': 'Hi'}]", " [ {'from': 'human', 'value': \"it's\"}]"):
        with pytest.raises(DataError, match="text as Python shows a list"):
            turns_of(text, role="user")
    with pytest.raises(DataError, match="not JSON: Unterminated string"):
        turns_of('[{"role": "user", "content": "cut sho', role="user")


def test_the_tools_of_a_row_stand_in_the_first_turn():
    turns = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    content = convert({"messages": turns, "tools": json.dumps([ADD])}, "messages")
    assert json.loads(content.prompt[0].tool_fields) == {"tools": [{"type": "function", "function": ADD}]}
    assert content.chosen == (Message("assistant", "", FIELDS),)
    with pytest.raises(DataError, match="tools: each needs a name"):
        tools_of([{"type": "function", "function": {"description": "x"}}])


@pytest.mark.parametrize("name", ["arguments", "parameters", "args", "input", "params", "kwargs"])
@pytest.mark.parametrize("given", [{"a": 2, "b": 3}, '{"a": 2, "b": 3}'])
def test_arguments_are_found_under_their_names_in_use(name, given):
    nothing = {"arguments": ""} if name != "arguments" else {}  # as tables of text write missing keys
    for call in (
        {"type": "function", "function": {"name": "add", name: given, **nothing}},
        {"name": "add", name: given},
        {"function": {"name": "add"}, name: given},
    ):
        (turn,) = turns_of([{"role": "assistant", "content": "", "tool_calls": [call]}], role="")
        assert turn.tool_fields == FIELDS
    (turn,) = turns_of([{"from": "function_call", "value": json.dumps({"name": "add", name: given})}], role="")
    assert turn.tool_fields == FIELDS


@pytest.mark.parametrize(
    ("call", "rule"),
    [
        ({"name": "add", "a": 2, "b": 3}, r"has \['a', 'b'\] and no arguments"),
        ({"function": {"name": "add", "payload": {"a": 2}}}, r"has \['payload'\] and no arguments"),
        ({"name": "add", "args": {"a": 2}, "arguments": {"a": 3}}, "arguments twice, and they differ"),
        ({"name": "add", "args": [2, 3]}, "arguments must be an object"),
    ],
)
def test_arguments_that_are_not_found_are_not_taken_for_none(call, rule):
    with pytest.raises(DataError, match=rule):
        turns_of([{"role": "assistant", "content": "", "tool_calls": [call]}], role="")


@pytest.mark.parametrize("empty", [{"content": ""}, {"content": " \n"}, {"content": None}, {"content": []}])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_empty_system_turn_says_nothing(role, empty):
    turns = [{"role": role, **empty}, {"role": "user", "content": "Hi"}]
    assert turns_of(turns, role="") == (Message("user", "Hi"),)
    assert turns_of([{"from": "system", "value": ""}, {"from": "human", "value": "Hi"}], role="") == (
        Message("user", "Hi"),
    )
    assert turns_of([{"role": role, "content": "Be brief."}, turns[1]], role="")[0] == Message("system", "Be brief.")
