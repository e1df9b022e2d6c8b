"""Give chat templates the tools, tool calls and results of a conversation, and tell which of them a template leaves out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.types import Message

Rows = list[dict[str, Any]]

_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "Probe.",
            "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "Probe."}}},
        },
    }
]
_CALL = {
    "type": "function",
    "id": "probe0001",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
_USER: dict[str, Any] = {"role": "user", "content": "Hi"}
_CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SPEAKING: dict[str, Any] = {**_CALLING, "content": "probe_words"}
_RESULT: dict[str, Any] = {
    "role": "tool",
    "content": "probe_result",
    "name": "probe_tool",
    "tool_call_id": "probe0001",
}


def template_rows(messages: Sequence[Message]) -> tuple[Rows, list[dict[str, Any]]]:
    """Return messages as templates read them, and the tools that the first of them holds.

    >>> template_rows([Message("user", "Hi", '{"tools": [{"type": "function"}]}')])
    ([{'role': 'user', 'content': 'Hi'}], [{'type': 'function'}])
    """
    rows: Rows = []
    tools: list[dict[str, Any]] = []
    for message in messages:
        fields = json.loads(message.tool_fields) if message.tool_fields else {}
        tools += fields.pop("tools", [])
        rows.append({"role": message.role, "content": message.content, **fields})
    return rows, tools


def speaks_and_calls(rows: Rows) -> bool:
    """Return whether a turn has words beside its tool calls; some templates write the calls alone."""
    return any("tool_calls" in row and row["content"].strip() for row in rows)


def left_out(
    rows: Rows, tools: Sequence[dict[str, Any]], render: Callable[[Rows, list[dict[str, Any]], bool], str], eos: str
) -> str:
    """Return what of the tools, calls and results in a conversation the template leaves out; empty if nothing.

    `render` gives the text of rows and tools, with a generation prompt or without. A call must also end with `eos`:
    a turn without it has no end that could be learned.
    """
    if tools and "probe_tool" not in render([_USER], _TOOLS, True):
        return "the tools"
    if any("tool_calls" in row for row in rows):
        before, after = render([_USER], _TOOLS, True), render([_USER, _CALLING], _TOOLS, False)
        said = after.removeprefix(before) if tools else render([_USER, _CALLING], [], False)
        if any(text not in said for text in ("probe_tool", "probe_key", "probe_value")):
            return "the assistant's tool calls"
        if eos not in said:
            return "the end of the turn of a tool call (the tokenizer's EOS)"
        if speaks_and_calls(rows) and "probe_words" not in render([_USER, _SPEAKING], _TOOLS if tools else [], False):
            return "the assistant's words beside a tool call"
    if any(row["role"] == "tool" for row in rows) and "probe_result" not in render(
        [_USER, _CALLING, _RESULT], _TOOLS, True
    ):
        return "the results of tools"
    return ""
