"""Read the turns of a conversation: `role`/`content`, ShareGPT's `from`/`value`, transcripts, tool calls and results.

A call is kept as chat templates expect it, `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, in the
JSON text `Message.tool_fields` beside the content of its turn. The tools of a conversation stand in its first turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_core.data.comparisons import TRANSCRIPT_TURN
from rlhf_core.data.values import string
from rlhf_core.errors import DataError
from rlhf_core.types import Message

Turns = tuple[Message, ...]

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_NOTHING = ("", "[]", "{}", "null")


def turns_of(value: Any, *, role: str) -> Turns:
    """Return `value` as turns. Text becomes one turn of `role`, and a list is read turn by turn."""
    if isinstance(value, str) and role:
        return (Message(role, string(value, role)),)
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"not turns: {type(value).__name__}; a list of role and content is needed")
    return tuple(_turn(item) for item in value)


def transcript(text: Any) -> Turns:
    """Return the turns of a raw transcript, in which each begins with `Human:` or `Assistant:` after an empty line."""
    pieces = TRANSCRIPT_TURN.split(string(text, "transcript"))
    if len(pieces) < 3 or pieces[0].strip():
        raise DataError("not a transcript: it must begin with 'Human:' or 'Assistant:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    spoken = zip(pieces[1::2], pieces[2::2], strict=True)
    return tuple(Message(roles[speaker], content.strip()) for speaker, content in spoken)


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Return the tools of a row as schemas `{"type": "function", "function": {...}}`; a row may hold them as JSON text.

    >>> tools_of('[{"name": "add", "parameters": {}}]')
    [{'type': 'function', 'function': {'name': 'add', 'parameters': {}}}]
    """
    found = _parsed(value, "tools")
    if not found:
        return []
    tools = found if isinstance(found, (list, tuple)) else [found]
    return [_tool(tool) for tool in tools]


def with_tools(turns: Turns, tools: Sequence[Mapping[str, Any]]) -> Turns:
    """Return `turns` with `tools` in the first of them."""
    fields = json.loads(turns[0].tool_fields) if turns[0].tool_fields else {}
    return (replace(turns[0], tool_fields=_json(fields | {"tools": tools})), *turns[1:])


def calls_tools(message: Message) -> bool:
    """Return whether a turn calls tools."""
    return bool(message.tool_fields) and "tool_calls" in json.loads(message.tool_fields)


def refuse_calls(row: Mapping[str, Any]) -> None:
    """Raise DataError if a row has tool calls outside of its turns: they would be left out."""
    for name in ("tool_calls", "function_call"):
        if name in row and not _is_nothing(row[name]):
            raise DataError(f"{name}: a row has them beside its turns; write them into the turn that makes the calls")


# ---------------------------------------------------------------- private


def _turn(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"not a turn: {type(item).__name__}; role and content are needed")
    calls = [call for name in ("tool_calls", "function_call") if name in item for call in _calls(item[name], name)]
    for role_name, content_name in (("role", "content"), ("from", "value")):
        if role_name in item and (content_name in item or calls):
            said = string(item[role_name], role_name).lower()
            if said not in _ROLES:
                raise DataError(f"unknown role: {said!r}; known are {sorted(_ROLES)}")
            content = item.get(content_name)
            if said == "function_call":
                calls, content = _calls(content, "function_call"), ""
            if calls and _ROLES[said] != "assistant":
                raise DataError(f"tool_calls: a turn of {said!r} has calls; only the assistant calls tools")
            text = "" if content is None and calls else string(content, "content")
            return Message(_ROLES[said], text, _tool_fields(item, calls, _ROLES[said]))
    raise DataError(f"not a turn: {sorted(item)}; role and content, or from and value, are needed")


def _tool_fields(item: Mapping[str, Any], calls: list[dict[str, Any]], role: str) -> str:
    """Return the JSON of what a template reads of a turn besides its content; the empty text if that is nothing."""
    if calls:
        return _json({"tool_calls": calls})
    names = [name for name in ("name", "tool_call_id") if role == "tool" and item.get(name)]
    return _json({name: string(item[name], name) for name in names}) if names else ""


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    found = _parsed(value, name)
    if not found:
        return []
    return [_call(one, name) for one in (found if isinstance(found, (list, tuple)) else [found])]


def _call(call: Any, name: str) -> dict[str, Any]:
    """Return a call with its arguments as an object, which templates write as JSON themselves."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(f"{name}: a call needs the name of a function and its arguments, {str(call)[:80]!r} has not")
    given = inner.get("arguments", inner.get("parameters"))
    arguments = _parsed(given, f"{name}.arguments") or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{name}: arguments must be an object, not {type(arguments).__name__}")
    function = {"name": string(inner["name"], name), "arguments": dict(arguments)}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    return {"type": "function", **identity, "function": function}


def _tool(tool: Any) -> dict[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(f"tools: each needs a name, {str(tool)[:80]!r} has none")
    return {"type": "function", "function": dict(inner)}


def _parsed(value: Any, name: str) -> Any:
    """Return a value that may be written as JSON text. Raises DataError for nulls inside of one that is not.

    A table of Parquet or Arrow gives every row all keys that occur in any row, and null where a row had none.
    """
    if _is_nothing(value):
        return None
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: not JSON ({error})") from error
    if _has_null(value):
        raise DataError(f"{name}: has nulls, which tables write for keys that a row has not; store it as JSON text")
    _json(value)
    return value


def _is_nothing(value: Any) -> bool:
    return value.strip() in _NOTHING if isinstance(value, str) else not value


def _has_null(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_null(item) for item in value.values())
    return any(map(_has_null, value)) if isinstance(value, (list, tuple)) else value is None


def _json(value: Any) -> str:
    try:
        return string(json.dumps(value, ensure_ascii=False, allow_nan=False), "tool call")
    except (TypeError, ValueError) as error:
        raise DataError(f"tool call: has no JSON ({error})") from error
