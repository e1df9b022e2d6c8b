"""Adapt reward functions of several signatures to one: from generations to an outcome.

| protocol | recognized by | called as |
|---|---|---|
| `generations` | its first parameter is `generations`, or it has one parameter of no known name | `f(generations)` |
| `openrlhf` | a parameter `queries` | `f(queries, prompts, labels)`, lists of text |
| `columns` | a parameter `labels`, or `generations` by keyword | `f(prompts=, completions=, labels=, **columns)`, lists of text |
| `trl` | otherwise one of `prompts`, `completions`, `completion_ids` | `f(prompts=, completions=, completion_ids=, **columns)` |
| `trl_text`, `trl_messages` | only by configuration | as `trl`, with text, or messages, for every prompt |

In `trl` prompt and completion are text where the data had the prompt as text, and messages where it had turns, as in
TRL: the completion is then `[{"role": "assistant", "content": text}]`. A function that raises since it takes text for
messages gets messages for every prompt, with a warning. A function gets the keywords that it names, and all of them if it
takes `**kwargs`; configured `arguments` are added and take precedence.

Columns come from the prompt's label. If it is a JSON object, each of its fields is a column (None in rows without it).
`label`, `labels`, `solution` and `answer` are the label itself where the object has no such field. Further columns are
`prompt_id`, `source`, `messages`, `completion_ids`, `action_mask` (per token: 1 sampled, 0 an environment's) and
`finish_reason`.

It returns a list of numbers or None (does not apply), an array, a tensor, or `{"rewards", "scores", "extra_logs"}`:
rewards are learned from, scores are for dynamic sampling, and the means of scores and the rest are logged. It may
be `async`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from rlhf_core.errors import ConfigError
from rlhf_core.rewards.batches import (
    Logs,
    NoReward,
    RewardOutcome,
    logged,
    merged_logs,
    plain_list,
    read_number,
    read_scores,
    shortened,
)
from rlhf_core.rewards.forgotten_return import forgotten_return
from rlhf_core.types import Generation, Message, label_fields

logger = logging.getLogger(__name__)

Protocol = Literal["generations", "columns", "openrlhf", "trl", "trl_text", "trl_messages"]
AnyProtocol = Protocol | Literal["auto"]

LABEL_COLUMNS = ("label", "labels", "solution", "answer")
_TRL = frozenset({"prompts", "completions", "completion_ids"})
_OF_TRL = ("trainer_state", "log_extra", "log_metric")
_GIVEN = {"columns": ("labels", "generations"), **dict.fromkeys(("trl", "trl_text", "trl_messages"), _OF_TRL)}
"""Protocol -> the arguments that its functions get besides prompts, completions and columns."""
_TEXT_FOR_MESSAGES = ("string indices must be integers", "'str' object has no attribute")
"""Python's error for code that takes text for messages, such as `completion[0]["content"]`."""
_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass
class Adapted:
    """A user's function with its configured arguments, called by its protocol.

    A `trl` function that turns out to read messages has the protocol `trl_messages` from then on.
    """

    function: Callable[..., Any]
    protocol: Protocol
    arguments: Mapping[str, Any]
    _warned: bool = False

    @property
    def is_async(self) -> bool:
        """Whether its batches may be gathered on one loop."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(
            getattr(self.function, "__call__", None)  # noqa: B004 - an object whose call is async
        )

    def outcomes(self, batches: Sequence[Sequence[Generation]], runner: asyncio.Runner) -> list[RewardOutcome]:
        """Call the function on each batch. Exceptions of the function are not caught.

        The batches of an async function run concurrently. Any other function is called outside of the loop, so that it
        may start a loop itself.
        """
        try:
            found = self._outcomes(batches, runner)
            self._warn_of_both_forms(batches)
            return found
        except (TypeError, AttributeError) as error:
            if self.protocol != "trl" or not any(sign in str(error) for sign in _TEXT_FOR_MESSAGES):
                raise
            try:
                found = replace(self, protocol="trl_messages")._outcomes(batches, runner)
            except Exception:
                raise error from None
        self.protocol = "trl_messages"
        shown = _name(self.function)
        logger.warning("%s reads messages: it gets them for prompts that are text, too; TRL would give it text", shown)
        return found

    def _warn_of_both_forms(self, batches: Sequence[Sequence[Generation]]) -> None:
        """Log, once, that a `trl` function gets text for some prompts and messages for others: their values may not compare."""
        forms = {one.prompt.conversational for batch in batches for one in batch}
        if self.protocol == "trl" and len(forms) > 1 and not self._warned:
            self._warned = True
            remedy = "set protocol = 'trl_text' or 'trl_messages' for one form"
            logger.warning("%s gets text for some prompts and messages for others; %s", _name(self.function), remedy)

    def _outcomes(self, batches: Sequence[Sequence[Generation]], runner: asyncio.Runner) -> list[RewardOutcome]:
        if not self.is_async:
            return [self._outcome(batch, runner) for batch in batches]

        async def all_of_them() -> list[RewardOutcome]:
            return list(await asyncio.gather(*(self._awaited(batch) for batch in batches)))

        return runner.run(all_of_them())

    def _outcome(self, generations: Sequence[Generation], runner: asyncio.Runner) -> RewardOutcome:
        log = _Log()
        answer = self._call(generations, log)
        if inspect.iscoroutine(answer):  # of a function that is not async itself, a partial or a lambda around one
            answer = runner.run(answer)
        return self._read(answer, len(generations), log)

    async def _awaited(self, generations: Sequence[Generation]) -> RewardOutcome:
        log = _Log()
        answer = await self._call(generations, log)
        return self._read(answer, len(generations), log)

    def _read(self, answer: Any, count: int, log: _Log) -> RewardOutcome:
        outcome = read_result(answer, count, also=log.logs())
        nothing = outcome.values.count(None)
        place = forgotten_return(self.function) if nothing else ""
        if place:
            remedy = "return a number there, or `return None` where the reward does not apply"
            raise ValueError(
                f"it returned None for {nothing} of {count} answers, and {place} can end without `return`: {remedy}"
            )
        return outcome

    def _call(self, generations: Sequence[Generation], log: _Log) -> Any:
        match self.protocol:
            case "generations":
                return self.function(generations, **self.arguments)
            case "openrlhf":
                prompts = [prompt_text(one.prompt.messages) for one in generations]
                queries = [prompt + one.completion.text for prompt, one in zip(prompts, generations, strict=True)]
                return self.function(queries, prompts, [one.prompt.label for one in generations], **self.arguments)
        given = columns_of(generations) | _said(generations, self.protocol)
        if self.protocol == "columns":
            given |= {"labels": [one.prompt.label for one in generations], "generations": list(generations)}
        else:
            given |= {"trainer_state": None, "log_extra": log.column, "log_metric": log.metric}
        return self.function(**{**self._accepted(given), **self.arguments})

    def _accepted(self, given: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments in `given` that the function accepts."""
        parameters = inspect.signature(self.function).parameters.values()
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            return given
        names = {one.name for one in parameters if one.kind in _KEYWORD}
        return {name: value for name, value in given.items() if name in names}


def adapt(function: Callable[..., Any], *, protocol: AnyProtocol, arguments: Mapping[str, Any]) -> Adapted:
    """Wrap `function` for calls; ConfigError if its parameters fit no protocol or not the `arguments`."""
    parameters = inspect.signature(function).parameters
    return Adapted(function, check_arguments(parameters, arguments, protocol, fields=None), dict(arguments))


def check_arguments(
    parameters: Mapping[str, inspect.Parameter],
    arguments: Mapping[str, Any],
    protocol: AnyProtocol,
    *,
    fields: Collection[str] | None,
) -> Protocol:
    """The protocol of a function with these parameters. ConfigError if it lacks an argument, or has no place for one.

    `fields` are the possible fields of labels; None if they are not known.
    """
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    unknown = [name for name in arguments if name not in parameters]
    if unknown and not takes_all:
        has = f"use one of {', '.join(parameters)}"
        raise ConfigError(f"arguments.{unknown[0]}", arguments[unknown[0]], "is not a parameter of the function", has)
    chosen = protocol_of(parameters, arguments) if protocol == "auto" else protocol
    required = [name for name, one in parameters.items() if one.default is one.empty and one.kind in _KEYWORD]
    given = {"generations": 1, "openrlhf": 3}.get(chosen)
    if given is not None:
        missing = [name for name in required if name not in [*list(parameters)[:given], *arguments]]
    else:
        known = {*columns_of([]), *_TRL, *_GIVEN[chosen], *arguments}
        missing = [name for name in required if fields is not None and name not in {*known, *fields}]
    unnamed = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_ONLY and one.default is one.empty]
    shown = f"({', '.join(parameters)})"
    if unnamed[given or 0 :]:
        rule = f"arguments are passed by name, which its parameter {unnamed[-1]!r} does not take"
        raise ConfigError("function", shown, rule, "remove the / after it")
    if missing:
        rule = f"nothing gives its parameter {missing[0]!r}"
        label = ", or make it a field of the labels" if given is None else ""
        raise ConfigError("function", shown, rule, f"set arguments.{missing[0]}, give the parameter a default{label}")
    if given is not None:
        try:
            inspect.Signature(list(parameters.values())).bind(*[None] * given, **arguments)
        except TypeError as error:
            rule = f"the protocol {chosen!r} passes {given} in order: {error}"
            raise ConfigError("function", shown, rule, "take them so, or set protocol") from None
    return chosen


def protocol_of(parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> Protocol:
    """Choose the protocol by the names of the parameters; ConfigError if none fits."""
    named = [
        name
        for name, one in parameters.items()
        if name not in arguments and one.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    if named[:1] == ["generations"]:
        return "generations"
    places = enumerate(("queries", "prompts", "labels"))
    if "queries" in named and all(named.index(name) == at for at, name in places if name in named):
        return "openrlhf"  # which passes them in this order
    if "labels" in named or "generations" in named:
        return "columns"
    if _TRL & set(named):
        return "trl"
    required = [name for name in named if parameters[name].default is inspect.Parameter.empty]
    if len(required) == 1:
        return "generations"
    rule = "the names of its parameters match no protocol"
    remedy = "name them as in docs/score.md, or set protocol"
    raise ConfigError("function", f"({', '.join(parameters)})", rule, remedy)


def prompt_text(messages: Sequence[Message]) -> str:
    r"""A conversation as text: one message is its content, several are `role: content` with an empty line after each.

    No chat template is applied, so the text does not depend on a model.

    >>> prompt_text([Message("user", "2+2?")]), prompt_text([Message("system", "Add."), Message("user", "2+2?")])
    ('2+2?', 'system: Add.\n\nuser: 2+2?\n\n')
    """
    if len(messages) == 1:
        return messages[0].content
    return "".join(f"{message.role}: {message.content}\n\n" for message in messages)


def columns_of(generations: Sequence[Generation]) -> dict[str, list[Any]]:
    """Build column -> one value per generation (see the module)."""
    rows = [label_fields(one.prompt.label) for one in generations]
    names = dict.fromkeys(name for row in rows for name in row)
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
    columns |= {
        name: [row.get(name, one.prompt.label) for row, one in zip(rows, generations, strict=True)]
        for name in LABEL_COLUMNS
    }
    return columns | {
        "prompt_id": [one.prompt.id for one in generations],
        "source": [one.prompt.source for one in generations],
        "messages": [_plain(one.prompt.messages) for one in generations],
        "completion_ids": [list(one.completion.token_ids) for one in generations],
        "action_mask": [list(one.completion.action_mask) for one in generations],
        "finish_reason": [one.completion.finish_reason for one in generations],
    }


def read_result(answer: Any, count: int, *, also: Logs = MappingProxyType({})) -> RewardOutcome:
    """Parse a function's result into an outcome of plain floats; ValueError or TypeError if it holds no numbers."""
    logs = [also]
    scores: tuple[float | None, ...] = ()
    if isinstance(answer, Mapping):
        extra = dict(answer.get("extra_logs") or {}) | {"scores": answer.get("scores")}
        logs += [logged(name, value, count) for name, value in extra.items()]
        scores = read_scores(answer.get("scores"), count)
        if "rewards" not in answer:
            raise ValueError(f"the returned dictionary has no 'rewards', only {sorted(answer)}")
        answer = answer["rewards"]
    if answer is None:
        raise ValueError("it returned None and no list of numbers: does it end without `return`?")
    given = plain_list(answer)
    failures = {at: value.reason for at, value in enumerate(given) if isinstance(value, NoReward)}
    values = tuple(None if at in failures else _number(value) for at, value in enumerate(given))
    return RewardOutcome(values, failures, merged_logs(logs), scores)


# ---------------------------------------------------------------- private


class _Log:
    """Logs of a function while it runs: the callables that TRL passes."""

    def __init__(self) -> None:
        self._parts: list[Logs] = []

    def column(self, name: str, values: Sequence[Any]) -> None:
        """Keep the mean of a column."""
        self._parts.append(logged(name, values, len(values)))

    def metric(self, name: str, value: float) -> None:
        self._parts.append(logged(name, value, 1))

    def logs(self) -> Logs:
        return merged_logs(self._parts)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _said(generations: Sequence[Generation], protocol: Protocol) -> dict[str, Any]:
    """Convert prompts and completions to messages or to text."""
    talks = [protocol == "trl_messages" or (protocol == "trl" and one.prompt.conversational) for one in generations]
    prompts, completions = [], []
    for one, talk in zip(generations, talks, strict=True):
        prompts.append(_plain(one.prompt.messages) if talk else prompt_text(one.prompt.messages))
        text = one.completion.text
        completions.append([{"role": "assistant", "content": text}] if talk else text)
    return {"prompts": prompts, "completions": completions}


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _number(value: Any) -> float | None:
    """Parse a reward, None if it does not apply; ValueError for anything else."""
    number = read_number(value)
    if number is None and plain_list(value) != [None]:
        found = value.tolist() if hasattr(value, "tolist") else value
        raise ValueError(f"a reward must be a number or None, not {shortened(repr(found))}: return float, int or bool")
    return number
