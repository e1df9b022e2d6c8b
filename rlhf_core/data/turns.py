"""Read the turns of a conversation: `role`/`content`, `from`/`value`, transcripts, tool calls and results.

The pair `from`/`value` is ShareGPT's. Content may be a list of parts of text, and turns may be JSON text. Reasoning
that is stored apart from the content of an answer is written before it, between `<think>` and `</think>`.

A call is kept as chat templates expect it, `{"type": "function", "function": {"name": ..., "arguments": {...}}}`, in
the JSON text `Message.tool_fields` next to the content of its turn. The tools of a conversation stand in its first
turn.
"""

import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from rlhf_core.data.row_functions import Row
from rlhf_core.errors import DataError
from rlhf_core.text import fold
from rlhf_core.types import Message

# ---------------------------------------------------------------- values

TRUTHS = {
    **dict.fromkeys(("true", "desirable", "chosen", "accepted", "preferred", "liked", "like", "thumbs_up", "👍"), True),
    **dict.fromkeys(
        ("false", "undesirable", "rejected", "dispreferred", "disliked", "dislike", "thumbs_down", "👎"), False
    ),
}
"""Words that can only be verdicts on an answer."""
_VERDICTS = TRUTHS | {
    **dict.fromkeys(
        ("1", "1.0", "yes", "good", "correct", "right", "positive", "pos", "safe", "helpful", "pass", "passed"), True
    ),
    **dict.fromkeys(("up", "thumbsup", "thumb_up", "upvote", "upvoted", "accept", "approve", "approved"), True),
    **dict.fromkeys(("better", "win", "winner", "acceptable"), True),
    **dict.fromkeys(
        ("0", "0.0", "no", "bad", "incorrect", "wrong", "negative", "neg", "unsafe", "unhelpful", "harmful"), False
    ),
    **dict.fromkeys(("down", "thumbsdown", "thumb_down", "downvote", "downvoted", "reject", "disapprove"), False),
    **dict.fromkeys(("worse", "lose", "loser", "unacceptable", "disapproved", "not_preferred", "not_chosen"), False),
    **dict.fromkeys(("fail", "failed"), False),
}
"""All words of verdicts where the column is known to hold some. Many are common answers, too, such as directions."""
_MINUS_ONE = ("-1", "-1.0")
_LOOKS = re.compile("[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]")
_LONGEST_INTEGER = 4300  # most digits of an integer that Python parses by default


def string(value: Any, name: str) -> str:
    """Check that a value is text that UTF-8 can hold; `name` is used in the error."""
    if not isinstance(value, str):
        raise DataError(f"not text: {name} is {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"not text: {name} has what UTF-8 cannot hold, half a surrogate pair or a bad byte") from error
    return value


class RepeatedKey(DataError):
    """Raised for a JSON object with one key twice, of which only the last value would be kept."""


def from_json(text: str) -> Any:
    """Parse JSON text. Raises RepeatedKey, or DataError for invalid JSON."""
    try:
        return json.loads(text, parse_int=_integer, object_pairs_hook=_object)
    except (json.JSONDecodeError, RecursionError) as error:
        place = f"{error.msg} at column {error.colno}" if isinstance(error, ValueError) else "brackets too deep"
        raise DataError(f"not JSON: {place}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise RepeatedKey(f"a key twice: an object of JSON has {twice!r} more than once; keep one of them")
    return found


def _integer(digits: str) -> int | Decimal:
    """Parse an integer, as a Decimal that keeps all digits if it is too long for `int`."""
    return int(digits) if len(digits) <= _LONGEST_INTEGER else Decimal(digits)


def label(row: Row) -> str:
    """Format the expected answer: text, dates and decimals unchanged, floats without an exponent, the rest as JSON."""
    value = row.get("label")
    if value is None or value != value:  # NaN, as pandas writes a missing number
        return ""
    if isinstance(value, Decimal):
        value = str(value)
    elif isinstance(value, float) and math.isfinite(value):  # pandas writes integers so where a row has none
        value = str(int(value)) if value.is_integer() else f"{Decimal(repr(value)):f}"
    elif isinstance(value, (datetime.date, datetime.time)):
        value = value.isoformat()
    elif not isinstance(value, str):
        value = _as_json(value, "label")
    return string(value, "label")


def _as_json(value: Any, name: str) -> str:
    def written(inner: Any) -> str:
        if isinstance(inner, (datetime.date, datetime.time)):
            return inner.isoformat()
        raise TypeError(f"{type(inner).__name__} has no JSON")

    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=written)
    except (TypeError, ValueError) as error:
        raise DataError(f"not JSON: {name}: {error}") from error


def margin(row: Row) -> float:
    """The margin of a row, or 0.0 if it has none. Raises DataError for a negative one."""
    if "margin" not in row or row["margin"] in (None, ""):
        return 0.0
    number = finite(row["margin"], "margin")
    if number < 0:
        raise DataError(
            f"negative margin: margin is {number:g}, so that the rejected answer is the better one; swap them"
        )
    return number


def annotator(row: Row) -> str:
    """The annotator of the row, a text or a number, as text; empty if unknown."""
    value = next((row[name] for name in ("annotator", "annotator_id") if row.get(name) is not None), "")
    if isinstance(value, float) and value.is_integer():  # a column of integers with gaps
        value = int(value)
    return string(str(value), "annotator").strip() if isinstance(value, (str, int)) else ""


def finite(value: Any, name: str) -> float:
    """Parse a finite number; `name` is used in the error."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"not a number: {name} is {value!r}") from error
    if not math.isfinite(number):
        raise DataError(f"not a number: {name} is {number}")
    return number


def rating(value: Any) -> float | None:
    """Parse a rating as a number, or None for a missing one (`N/A`, NaN). Raises DataError for anything else."""
    if value is None or value != value or spelling(value) in ("", "n/a", "na", "none", "null"):  # pandas writes NaN
        return None
    if isinstance(value, bool):
        raise DataError(f"not a number: a score is {value}")
    return finite(value, "a score")


def truth(value: Any) -> bool:
    """Parse a verdict as a boolean. Accepts booleans, 0 or -1 and 1, their spellings in CSV, and words: `desirable`."""
    good = False if spelling(value) in _MINUS_ONE else worth(value)
    if good is None:
        raise DataError(f"not true or false: label is {value!r}")
    return good


def worth(value: Any) -> bool | None:
    """True for a word that means good, False for a word that means bad, None for any other value.

    >>> worth("Thumbs-Down"), worth("up"), worth("LABEL_0")
    (False, True, None)
    """
    said = re.sub(r"(?<=\w)[\s-]+(?=\w)", "_", spelling(value))
    return _VERDICTS[said] if said in _VERDICTS else None


def probability(value: Any) -> float:
    """Convert a label to a probability: 1.0 or 0.0 for good or bad, and a soft label unchanged."""
    good = worth(value)
    if good is not None:
        return float(good)
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"not true or false: label is {value!r}") from error
    if not 0 <= number <= 1:  # NaN fails too
        raise DataError(f"not a probability: label is {number}")
    return number


def spelling(value: Any) -> str:
    r"""Convert a value to lower-case text without spaces around it; the color of a thumb is ignored.

    >>> spelling(" \uff39es"), spelling("👍\U0001f3fd")
    ('yes', '👍')
    """
    return _LOOKS.sub("", fold(str(value))).strip().lower()


# ---------------------------------------------------------------- turns

Turns = tuple[Message, ...]

TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ \t]?")
"""Pattern of the beginning of a turn in a raw transcript."""
_ROLES = {
    "system": "system",
    "developer": "system",
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
_CALLS = ("tool_calls", "function_call")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TRAINED = ("weight", "train", "loss_mask", "loss", "trainable")  # keys that mark whether a turn is trained on
ARGUMENTS = ("arguments", "parameters", "args", "input", "params", "kwargs")
_OF_CALLS = {"id", "type", "function", "name", "index", *ARGUMENTS}
_OF_RESULTS = ("name", "tool_call_id")
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "thinking": "thinking", "reasoning": "text"}
"""Type of a part of the content -> the key with its text."""
_LIST_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])\w+\1\s*:""")
_ROLE_AS_TEXT, _CONTENT_AS_TEXT = (re.compile(rf"""(['"])({keys})\1\s*:""") for keys in ("role|from", "content|value"))


def turns_of(value: Any, *, role: str) -> Turns:
    """Convert `value` to turns.

    Text becomes one turn of `role`, unless it is turns as JSON; a list is read turn by turn.
    """
    if isinstance(value, str):
        found = _turns_in_text(value)
        if found is None and role:
            return (Message(role, string(value, role)),)
        value = value if found is None else found
    if isinstance(value, Mapping) and role:
        value = [value]
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(f"not turns: {type(value).__name__}; a list of role and content is needed")
    turns = [_turn(item) for item in value]
    said = tuple(turn for turn in turns if turn.role != "system" or fold(turn.content).strip() or turn.tool_fields)
    return said or tuple(turns)  # an empty system turn says nothing; as the only turn it is an error later


def is_text_of_turns(value: Any) -> bool:
    """Whether `value` is text in which a list of turns is written."""
    return isinstance(value, str) and _turns_in_text(value) is not None


def holds_turns(value: Any) -> bool:
    """Whether `value` is turns instead of text: a list of them, or their JSON text."""
    return not isinstance(value, str) or is_text_of_turns(value)


def looks_like_turns(value: Any) -> bool:
    """True for a turn, or a list of turns, with any roles."""
    turns = value if isinstance(value, list) else [value]
    return bool(turns) and all(isinstance(turn, Mapping) and _pair(turn) is not None for turn in turns)


def begins_conversation(value: Any) -> bool:
    """Whether `value`, turns or a transcript, begins with a turn that is not the assistant's."""
    if isinstance(value, str) and not is_text_of_turns(value):
        return TRANSCRIPT_TURN.match(value) is not None
    return not isinstance(value, Mapping) and turns_of(value, role="")[0].role != "assistant"


def unread_keys(value: Any) -> set[str]:
    """The keys of turns, of their parts and calls, that are not empty and that `turns_of` does not read.

    >>> sorted(unread_keys([{"role": "user", "content": "Hi", "name": "Zoë", "weight": None}]))
    ['name']
    """
    value = _turns_in_text(value) if isinstance(value, str) else value
    found: set[str] = set()
    for turn in [value] if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ():
        pair = _pair(turn) if isinstance(turn, Mapping) else None
        if pair is None:
            tool = isinstance(turn, Mapping) and isinstance(turn.get("function"), Mapping)
            found |= _others(turn, {"type", "function"}) if tool else set()
            continue
        role, content = pair
        result = _ROLES.get(str(turn[role]).lower()) == "tool"
        known = {role, content, *_CALLS, *_REASONING, *_TRAINED, *(_OF_RESULTS if result else ())}
        found |= _others(turn, known)
        for name, inner, keys in (
            (content, turn.get(content), {"type", *_PARTS.values()}),
            ("tool_calls", turn.get("tool_calls"), _OF_CALLS - {"index"}),
        ):
            for part in inner if isinstance(inner, (list, tuple)) else ():
                found |= {f"{name}[].{key}" for key in _others(part, keys)} if isinstance(part, Mapping) else set()
    return found


def transcript(text: Any) -> Turns:
    """Split a raw transcript into turns; each begins with `Human:` or `Assistant:` after an empty line."""
    pieces = TRANSCRIPT_TURN.split(string(text, "transcript"))
    if len(pieces) < 3 or pieces[0].strip():
        raise DataError("not a transcript: it must begin with 'Human:' or 'Assistant:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    spoken = zip(pieces[1::2], pieces[2::2], strict=True)
    return tuple(Message(roles[speaker], content.strip()) for speaker, content in spoken)


def asked(prompt: str) -> Any:
    """Split a prompt into turns if it is a transcript (`Human: ... Assistant:`); otherwise leave it unchanged."""
    if not TRANSCRIPT_TURN.match(prompt.strip()):
        return prompt
    pieces = TRANSCRIPT_TURN.split(prompt.strip())
    turns = [
        {"from": speaker.lower(), "value": text.strip()}
        for speaker, text in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    return turns[:-1] if turns[-1]["from"] == "assistant" and not turns[-1]["value"] else turns


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Convert the tools of a row, which may be JSON text, to schemas `{"type": "function", "function": {...}}`.

    >>> tools_of('[{"name": "add", "parameters": {}}]')
    [{'type': 'function', 'function': {'name': 'add', 'parameters': {}}}]
    """
    found = _parsed(value, "tools")
    if not found:
        return []
    tools = found if isinstance(found, (list, tuple)) else [found]
    return [_tool(tool) for tool in tools]


def with_tools(turns: Turns, tools: Sequence[Mapping[str, Any]]) -> Turns:
    fields = json.loads(turns[0].tool_fields) if turns[0].tool_fields else {}
    return (replace(turns[0], tool_fields=_json(fields | {"tools": tools})), *turns[1:])


def calls_tools(message: Message) -> bool:
    return bool(message.tool_fields) and "tool_calls" in json.loads(message.tool_fields)


def refuse_calls(row: Mapping[str, Any]) -> None:
    """Raise DataError if a row has tool calls outside of its turns: they would be left out."""
    for name in _CALLS:
        if name in row and not _is_nothing(row[name]):
            raise DataError(f"{name}: a row has them beside its turns; write them into the turn that makes the calls")


def _turn(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise DataError(f"not a turn: {type(item).__name__}; role and content are needed")
    pair = _pair(item)
    if pair is None:
        raise DataError(f"not a turn: {sorted(item)}; role and content, or from and value, are needed")
    calls = [call for name in _CALLS if name in item for call in _calls(item[name], name)]
    said = string(item[pair[0]], pair[0]).lower()
    if said not in _ROLES:
        raise DataError(f"unknown role: {said!r}; known are {sorted(_ROLES)}")
    role, content = _ROLES[said], item.get(pair[1])
    if said == "function_call":
        calls, content = _calls(content, "function_call"), ""
    if calls and role != "assistant":
        raise DataError(f"tool_calls: a turn of {said!r} has calls; only the assistant calls tools")
    _refuse_untrained(item, role)
    text, thoughts = _text(content, calls, role)
    thoughts += [string(item[name], name) for name in _REASONING if not _is_nothing(item.get(name))]
    return Message(role, _with_reasoning(text, thoughts, role), _tool_fields(item, calls, role))


def _pair(item: Mapping[str, Any]) -> tuple[str, str] | None:
    """The names of the keys with role and content, or None if the turn has no such pair."""
    for pair in (("role", "content"), ("from", "value")):
        if pair[0] in item and (pair[1] in item or any(not _is_nothing(item.get(name)) for name in _CALLS)):
            return pair
    return None


def _others(item: Mapping[str, Any], known: set[str]) -> set[str]:
    return {str(key) for key, value in item.items() if key not in known and value not in (None, "", [], {}, ())}


def _turns_in_text(text: str) -> Any:
    """Parse the turns that are written as JSON in `text`; None for any other text.

    Raises DataError for turns as Python shows them, and for JSON of turns that cannot be read.
    """
    match = _LIST_AS_TEXT.match(text)
    if match is None or not (_ROLE_AS_TEXT.search(text) and _CONTENT_AS_TEXT.search(text)):
        return None
    if match[1] == "'":
        raise DataError("not turns: text as Python shows a list, whose escapes are ambiguous; store turns as JSON")
    try:
        found = from_json(text)
    except DataError as error:
        if "Extra data" in str(error):  # words after the list
            return None
        raise
    pairs = [_pair(turn) if isinstance(turn, Mapping) else None for turn in found]
    known = all(pair and str(turn[pair[0]]).lower() in _ROLES for turn, pair in zip(found, pairs, strict=True))
    return found if known else None


def _text(content: Any, calls: list[dict[str, Any]], role: str) -> tuple[str, list[str]]:
    """The text of a turn, and the reasoning among the parts of its content."""
    if content is None and (calls or role == "system"):
        return "", []
    if not isinstance(content, (list, tuple)):
        return string(content, "content"), []
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in _PARTS:
            raise DataError(f"not text: content has a part of type {kind!r}; only parts of text can be read")
        into = thoughts if kind in ("thinking", "reasoning") else texts
        into.append(string(part.get(_PARTS[kind]) if isinstance(part, Mapping) else part, "content"))
    return "".join(texts), thoughts


def _with_reasoning(text: str, thoughts: list[str], role: str) -> str:
    """Prepend the reasoning to an answer, as Qwen's and DeepSeek's templates write it."""
    if not thoughts:
        return text
    if role != "assistant" or len(set(thoughts)) > 1 or "<think>" in text:
        raise DataError(
            "reasoning: a turn that is not the assistant's has it, or one has it twice; keep it in one place of an answer"
        )
    return f"<think>\n{thoughts[0].strip()}\n</think>\n\n{text.lstrip()}"


def _refuse_untrained(item: Mapping[str, Any], role: str) -> None:
    """Raise DataError if a row's training mark contradicts the rule that exactly the answers are trained on."""
    for name in _TRAINED:
        if name not in item or item[name] in (None, "", []):
            continue
        wanted = role == "assistant"
        if str(item[name]).strip().lower() not in (("1", "1.0", "true") if wanted else ("0", "0.0", "false")):
            rule = "all answers of a conversation are trained on, with equal weight, and no other turn is"
            raise DataError(
                f"{name}: a turn of the {role} has {item[name]!r}; {rule}; end the conversation before it, or leave the key out"
            )


def _tool_fields(item: Mapping[str, Any], calls: list[dict[str, Any]], role: str) -> str:
    """The JSON of the parts of a turn that a template reads besides its content; "" if the turn has none."""
    if calls:
        return _json({"tool_calls": calls})
    names = [name for name in _OF_RESULTS if role == "tool" and item.get(name)]
    return _json({name: string(item[name], name) for name in names}) if names else ""


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    found = _parsed(value, name)
    if not found:
        return []
    return [_call(one, name) for one in (found if isinstance(found, (list, tuple)) else [found])]


def _call(call: Any, name: str) -> dict[str, Any]:
    """Convert a call to one with its arguments as an object, which templates write as JSON themselves."""
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(f"{name}: a call needs the name of a function and its arguments, {str(call)[:80]!r} has not")
    arguments = _parsed(call_arguments(call), f"{name}.arguments") or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{name}: arguments must be an object, not {type(arguments).__name__}")
    function = {"name": string(inner["name"], name), "arguments": dict(arguments)}
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}
    return {"type": "function", **identity, "function": function}


def call_arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a tool call, under any of their names in use; None if it has none.

    Raises DataError for two that differ, and for other fields that hold something where no name is known.

    >>> call_arguments({"function": {"name": "f", "args": {"a": 1}}})
    {'a': 1}
    """
    inner = call.get("function")
    levels = [call, inner] if isinstance(inner, Mapping) else [call]
    found = [level[name] for level in levels for name in ARGUMENTS if name in level]
    given = [value for value in found if not _is_nothing(value)]
    if any(value != given[0] for value in given):
        raise DataError(f"a call has its arguments twice, and they differ: {str(call)[:80]!r}")
    others = {key for level in levels for key in _others(level, _OF_CALLS)}
    if others and not found:
        raise DataError(f"a call has {sorted(others)} and no arguments; name them 'arguments'")
    return (given or found or [None])[0]


def _tool(tool: Any) -> dict[str, Any]:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise DataError(f"tools: each needs a name, {str(tool)[:80]!r} has none")
    return {"type": "function", "function": dict(inner)}


def _parsed(value: Any, name: str) -> Any:
    """Parse a value that may be JSON text. Raises DataError for nulls inside a value that is not.

    A table of Parquet or Arrow gives every row all keys that occur in any row, and null where a row had none.
    """
    if _is_nothing(value):
        return None
    if isinstance(value, str):
        try:
            return from_json(value)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
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
