"""Tool calling: functions that the policy calls by `<tool_call>{json}</tool_call>` in its answers.

The format is the one in Hermes and Qwen templates: `{"name": ..., "arguments": {...}}`. A mistake in a call is reported
to the policy as the tool's answer, so that it can correct it.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.agents.environment import StepResult
from rlhf_core.data.turns import call_arguments
from rlhf_core.errors import ConfigError, DataError, nearest
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.types import encodable
from rlhf_core.user_code.modules import NO_DIGESTS, load_callables

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function and the JSON schema of its call."""

    function: Callable[..., Any]
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it; `problem` is the reason if it cannot be made."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""


class ToolEnvironment:
    """One episode with tools; it ends with the first answer that calls none."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], *, max_tool_calls: int) -> None:
        self._functions = functions
        self._left = max_tool_calls
        self._calls = 0
        self._failures = 0

    async def step(self, action: str) -> StepResult:
        """Make the calls in `action`; each result is a turn of the role `tool`."""
        calls = parse_calls(action)
        results = [await self._result(call) for call in calls]
        counts = {"tool_calls": float(self._calls), "tool_failures": float(self._failures)}
        return StepResult([{"role": "tool", "content": text} for text in results], done=not calls, extras=counts)

    async def _result(self, call: ToolCall) -> str:
        self._calls += 1
        problem = call.problem
        if self._calls > self._left:
            problem = f"no tool call is left of {self._left}; give your answer"
        elif not problem and call.name not in self._functions:
            problem = f"there is no tool {call.name}; {nearest(call.name, list(self._functions))}"
        if not problem:
            function = self._functions[call.name]
            try:
                inspect.signature(function).bind(**call.arguments)
                result = function(**call.arguments)
                return as_text(await result if inspect.isawaitable(result) else result)
            except Exception as error:  # may be caused by the policy's arguments: report it to the policy
                problem = without_secrets(f"{type(error).__name__}: {error}")
        self._failures += 1
        return f"error: {problem}"


def parse_calls(text: str) -> list[ToolCall]:
    """Find the tool calls of an answer, in order.

    >>> parse_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, problem='')]
    >>> parse_calls("<tool_call>{a}</tool_call>")[0].problem[:28]
    'the call is no JSON (Expecti'
    """
    return [_parsed(body) for body in CALL.findall(text)]


def _parsed(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except json.JSONDecodeError as error:
        return ToolCall("", {}, f"the call is no JSON ({error.msg} at character {error.pos})")
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return ToolCall("", {}, "the call is no JSON that can be read (a number too long, or brackets too deep)")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", {}, 'the call must read {"name": ..., "arguments": {...}}')
    name = encodable(call["name"])
    try:
        arguments = call_arguments(call)
    except DataError:
        return ToolCall(name, {}, "the arguments are given twice, or under another name than 'arguments'")
    arguments = {} if arguments is None and call.keys() <= {"name", "id", "type"} else arguments
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "the arguments must be an object")
    return ToolCall(name, arguments)


def as_text(result: Any) -> str:
    """Format a tool's result for the policy: text unchanged, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def load_tools(specs: Sequence[str], *, code: Mapping[str, str] = NO_DIGESTS, notes: str = "") -> dict[str, Tool]:
    """Load the tools by name.

    Raises ConfigError if a function has no types, or a docstring that does not describe its arguments.
    """
    from transformers.utils import get_json_schema  # 1.7 s, and only this function needs it

    tools: dict[str, Tool] = {}
    for spec, function in zip(specs, load_callables("agent.tools", specs, code=code, notes=notes), strict=True):
        try:
            schema = get_json_schema(function)
        except Exception as error:  # TypeHintParsingException, DocstringParsingException
            raise ConfigError(
                "agent.tools",
                spec,
                f"no schema can be derived from it ({error})",
                "add types and documentation to its arguments",
            ) from error
        name = schema["function"]["name"]
        if name in tools:
            raise ConfigError("agent.tools", spec, f"two tools are named {name}", "rename one")
        tools[name] = Tool(function, schema)
    return tools
