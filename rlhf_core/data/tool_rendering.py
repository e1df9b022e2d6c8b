"""Render conversations with a chat template, and find out what of them it leaves out: words, tools, calls and results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rlhf_core.errors import ConfigError, DataError, explain
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
_ANSWERED: Rows = [
    {"role": "user", "content": "probe_question"},
    {"role": "assistant", "content": "probe_answer"},
]
_GOING_ON: Rows = [
    {"role": role, "content": content}
    for at in range(2)
    for role, content in (("user", f"probe_question_{at}"), ("assistant", ""))  # earlier answers may be rewritten
]
_SYSTEM: dict[str, Any] = {"role": "system", "content": "probe_system"}
_USER: dict[str, Any] = {"role": "user", "content": "Hi"}
_CALLING: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SPEAKING: dict[str, Any] = {**_CALLING, "content": "probe_words"}
_RESULT: dict[str, Any] = {
    "role": "tool",
    "content": "probe_result",
    "name": "probe_tool",
    "tool_call_id": "probe0001",
}


_TODAY = datetime(2024, 7, 26)
"""Date that templates print as today's (the same as in Llama 3), so that tokens do not depend on the day of a run."""


class Renderer:
    """The chat template of `tokenizer`, with `tools` (JSON schemas) in every conversation.

    Some templates, those of multimodal models among them, show contents only as lists of parts, and nothing of a text:
    they get `[{"type": "text", "text": ...}]` (`in_parts`). ConfigError if a template shows the words of a user or of an
    answer in neither form; for those of a system turn, further questions, tools, calls and results as soon as a
    conversation has any.
    """

    def __init__(self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._checked: set[tuple[bool, ...]] = set()
        self.in_parts = False
        missing = self._silent_role(_ANSWERED)
        if missing != "":
            self.in_parts = True
            still = self._silent_role(_ANSWERED)
            self.in_parts = still == ""
            if not self.in_parts and missing:
                raise self._refused(f"the words of the role {still or missing}", "conversations")

    def __call__(self, messages: Sequence[Message], *, generation_prompt: bool, eos: str) -> str:
        """Return the text of a conversation; a turn that calls tools must end with `eos`. DataError if it is rejected."""
        rows, tools = template_rows(messages)
        system = any(message.role == "system" for message in messages)
        again = sum(message.role == "user" for message in messages) > 1
        used = system, again, *(_uses(rows, tools) if any(message.tool_fields for message in messages) else ())
        if any(used) and used not in self._checked:
            if system and self._silent_role([_SYSTEM, *_ANSWERED]):
                raise self._refused("the words of the role system", "conversations with a system turn")
            if again and self._silent_role(_GOING_ON):
                raise self._refused("every question of a user", "conversations of several")
            missing = left_out(rows, tools, self.apply, eos) if len(used) > 2 else ""
            if missing:
                raise self._refused(missing, "conversations with tools")
            self._checked.add(used)
        return self.apply(rows, [*self._tools, *tools], generation_prompt)

    def apply(self, rows: Rows, tools: list[dict[str, Any]], generation_prompt: bool) -> str:
        """Return the text of rows and tools as the template has it."""
        try:
            # An argument of this name replaces the clock that transformers passes to templates.
            return str(
                self._tokenizer.apply_chat_template(
                    as_parts(rows) if self.in_parts else rows,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    strftime_now=_TODAY.strftime,
                )
            )
        except Exception as error:  # templates raise their own errors, e.g. for an unsupported system turn
            roles = [row["role"] for row in rows]
            raise DataError(
                explain("messages.role", roles, f"the chat template rejects them ({error})", "change the turns")
            ) from error

    def _silent_role(self, rows: Rows) -> str | None:
        """Return the first role of `rows` whose words the template leaves out, "" if none, and None if it rejects them."""
        try:
            text = self.apply(rows, [], False)
        except DataError:  # it gives its reason where the conversation is rendered
            return None
        return next((row["role"] for row in rows if row["content"] not in text), "")

    def _refused(self, missing: str, use: str) -> ConfigError:
        rule = f"the template does not render {missing}, so {use} cannot be trained on"
        remedy = "give a template that does (prepare_data.chat_template), or leave these rows out of the source"
        return ConfigError(explain("chat_template", str(self._tokenizer.name_or_path), rule, remedy))


def as_parts(rows: Rows) -> Rows:
    """Return `rows` with each content as a list of parts.

    >>> as_parts([{"role": "user", "content": "Hi"}])
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}]
    """
    return [{**row, "content": [{"type": "text", "text": row["content"]}]} for row in rows]


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


def _uses(rows: Rows, tools: Sequence[dict[str, Any]]) -> tuple[bool, ...]:
    """Return which of tools, calls, words beside calls, and results a conversation has."""
    calls, results = any("tool_calls" in row for row in rows), any(row["role"] == "tool" for row in rows)
    return bool(tools), calls, speaks_and_calls(rows), results


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
