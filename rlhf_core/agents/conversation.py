"""A conversation over the chat protocol, kept as its exact tokens.

The client sends all messages with each request, as text. Messages of earlier requests are compared with the kept ones.
Only new messages are rendered and tokenized, so the policy's turns are never tokenized again. A client that changes
earlier messages (it summarizes, drops its thoughts, starts over) is refused: its request has no exact tokens.
"""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.agents.programs import Answer, EpisodeCut, EpisodeFailed, ProgramEngine
from rlhf_core.agents.tools import parse_calls
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.pieces import encode
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import (
    ActionSpan,
    Column,
    Completion,
    FinishReason,
    Message,
    SamplingRequest,
    derive_seed,
    encodable,
    floats,
    ids,
    joined,
)


class RequestRefused(ValueError):
    """A request that cannot be answered exactly; `code` is short and for programs."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(problem)
        self.code = code


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call in the format of the protocol; `arguments` is JSON with sorted keys."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """The parts of a message that are compared and rendered."""

    role: str
    content: str
    calls: tuple[ToolUse, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """A turn of the policy, and the tokens before it."""

    prompt_ids: Column[int]
    answer: Answer
    message: ChatMessage


class Conversation:
    """One conversation: `chat` with messages, or `continue_text` with plain text or tokens, not both.

    A request that repeats the last one word for word gets the same turn: clients send again after a lost connection.
    """

    def __init__(self, template: ChatTemplate, engine: ProgramEngine) -> None:
        self._template = template
        self._engine = engine
        self._past: tuple[ChatMessage, ...] = ()
        self._text: str | None = None
        self._token_ids = ids(())
        self._shown: tuple[str, ...] = ()
        self._key: object = None
        self._turn: asyncio.Task[PolicyTurn] | None = None
        self.turns: list[PolicyTurn] = []
        self.cut = False
        """Whether the last turn was cut for its length, or one was refused because nothing was left."""

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int = 0
    ) -> PolicyTurn:
        """Sample the policy's next turn. Raises RequestRefused, or EpisodeCut if no turn is left."""
        sent = tuple(map(chat_message, messages))
        key = ("chat", sent, json.dumps(list(tools), sort_keys=True))
        return await self._once(key, lambda: self._chat(sent, tools, max_tokens))

    async def continue_text(self, prompt: str | Sequence[int], *, max_tokens: int = 0) -> PolicyTurn:
        """Sample the policy's next turn; `prompt` is the whole conversation so far."""
        key = ("text", prompt if isinstance(prompt, str) else tuple(prompt))
        return await self._once(key, lambda: self._continue(prompt, max_tokens))

    async def _once(self, key: object, start: Any) -> PolicyTurn:
        if self._turn is None or key != self._key:
            if self._turn is not None and not self._turn.done():
                raise RequestRefused("busy", "another turn of this conversation is being sampled; wait for it")
            turn: Coroutine[Any, Any, PolicyTurn] = start()
            self._key, self._turn = key, asyncio.ensure_future(turn)
        return await asyncio.shield(self._turn)

    async def _chat(
        self, messages: tuple[ChatMessage, ...], tools: Sequence[Mapping[str, Any]], max_tokens: int
    ) -> PolicyTurn:
        if self._text is not None:
            raise RequestRefused("mixed", "this conversation began with plain text; start another one")
        if self._past and any(sorted_json(tool) not in self._shown for tool in tools):
            raise RequestRefused(
                "tools", "one of the tools was not in the first request, and only the first request can define tools"
            )
        prompt_ids = self._following(messages) if self._past else self._opening(messages, tools)
        answer = await self._sampled(prompt_ids, max_tokens)
        calls = parse_calls(answer.text) if tools else []
        message = ChatMessage("assistant", answer.text)
        if calls and not any(call.problem for call in calls):
            outside = answer.text.partition("<tool_call>")[0].strip()
            message = ChatMessage("assistant", outside, tuple(ToolUse(c.name, sorted_json(c.arguments)) for c in calls))
        self._past = (*messages, message)
        return self._kept(PolicyTurn(prompt_ids, answer, message))

    def _opening(self, messages: tuple[ChatMessage, ...], tools: Sequence[Mapping[str, Any]]) -> Column[int]:
        if not messages or any(message.calls for message in messages):
            raise RequestRefused(
                "messages", "the first request has no messages, or has tool calls that the policy did not sample"
            )
        try:
            self._template = self._template.with_tools(tools)
            self._shown = tuple(map(sorted_json, tools))
            return self._template.prompt_ids([Message(message.role, message.content) for message in messages])
        except (ConfigError, DataError) as error:
            raise RequestRefused("template", str(error)) from error

    def _following(self, messages: tuple[ChatMessage, ...]) -> Column[int]:
        new = messages[len(self._past) :]
        if messages[: len(self._past)] != self._past or not new or any(message.role == "assistant" for message in new):
            differs = next(
                (i for i, (a, b) in enumerate(zip(messages, self._past)) if a != b), min(len(messages), len(self._past))
            )
            raise RequestRefused(
                "history",
                f"message {differs + 1} differs from this conversation, whose tokens are kept as they were "
                f"sampled: send its {len(self._past)} messages unchanged and add to them",
            )
        if self.cut:
            raise EpisodeCut("the last turn was cut for its length, so nothing can follow it")
        ended = bool(self._token_ids) and self._token_ids[-1] == self._template.eos_id
        try:
            added = self._template.turn_ids([Message(message.role, message.content) for message in new])
        except DataError as error:
            raise RequestRefused("template", str(error)) from error
        # The turn may have ended with a stop token other than the one that the template expects.
        return joined(self._token_ids, () if ended else (self._template.eos_id,), added)

    async def _continue(self, prompt: str | Sequence[int], max_tokens: int) -> PolicyTurn:
        if self._past:
            raise RequestRefused("mixed", "this conversation began with messages; start another one")
        prompt_ids = self._text_ids(prompt) if isinstance(prompt, str) else ids(prompt)
        if not prompt_ids or prompt_ids[: len(self._token_ids)] != self._token_ids:
            raise RequestRefused("history", "the prompt does not begin with the text of this conversation so far")
        before = prompt if isinstance(prompt, str) else self._template.decode(prompt_ids)
        answer = await self._sampled(prompt_ids, max_tokens)
        self._text = before + answer.text
        return self._kept(PolicyTurn(prompt_ids, answer, ChatMessage("assistant", answer.text)))

    def _text_ids(self, prompt: str) -> Column[int]:
        """The tokens of `prompt`, of which only the new end is tokenized."""
        text = self._text or ""
        if not prompt.startswith(text):
            raise RequestRefused(
                "history", "the prompt does not begin with the text of this conversation so far; send it unchanged"
            )
        added = prompt[len(text) :]
        if not self._token_ids:
            return encode(self._template.tokenizer, added)
        try:
            return self._token_ids + self._template.following_ids(added, after=self._token_ids[-1])
        except DataError as error:
            raise RequestRefused("text", str(error)) from error

    async def _sampled(self, prompt_ids: Column[int], max_tokens: int) -> Answer:
        try:
            return await self._engine.generate(tuple(prompt_ids), max_tokens=max_tokens)
        except EpisodeCut:
            self.cut = True
            raise

    def _kept(self, turn: PolicyTurn) -> PolicyTurn:
        self._token_ids = turn.prompt_ids + turn.answer.token_ids
        self.cut = turn.answer.finish_reason == "length"
        self.turns.append(turn)
        return turn


def chat_message(message: Mapping[str, Any]) -> ChatMessage:
    """Parse a message of the chat protocol.

    Raises RequestRefused if it has another form, or a part that no template can show.
    """
    try:
        return _chat_message(message)
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"a message does not have the form of the chat protocol ({type(error).__name__}: {error})"
        raise RequestRefused("messages", problem) from error


def _chat_message(message: Mapping[str, Any]) -> ChatMessage:
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") not in ("text", "output_text", "input_text") for part in content):
            raise RequestRefused(
                "content", "a message contains something other than text, and the policy reads only text"
            )
        content = "".join(str(part["text"]) for part in content)
    role = str(message.get("role", ""))
    if not role or not isinstance(content or "", str):
        raise RequestRefused("messages", "each message has a role and text as its content")
    calls = tuple(tool_use(call["function"]) for call in message.get("tool_calls") or ())
    return ChatMessage("system" if role == "developer" else role, encodable(content or ""), calls)


def tool_use(function: Mapping[str, Any]) -> ToolUse:
    """Parse a call; arguments that are not JSON stay unchanged."""
    arguments = function.get("arguments") or "{}"
    try:
        return ToolUse(str(function["name"]), sorted_json(json.loads(arguments)))
    except json.JSONDecodeError:
        return ToolUse(str(function["name"]), str(arguments))


def sorted_json(value: Any) -> str:
    """Encode `value` as JSON that equal values share, without half surrogate pairs, which no answer can hold."""
    return encodable(json.dumps(value, ensure_ascii=False, sort_keys=True))


# ---------------------------------------------------------------- transcript


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """A finished episode. `prompt_ids` differ from the prompt's own where the environment added to it."""

    prompt_ids: Column[int]
    completion: Completion


class Transcript:
    """Prompt, turns and the environment's text so far, within a budget of tokens.

    >>> text = Transcript(ids((1, 2)), seed=7, limit=10)
    >>> text.request(4)
    SamplingRequest(prompt_ids=(1, 2), seed=7, max_tokens=4, routed_experts=False)
    """

    def __init__(self, prompt_ids: Column[int], *, seed: int, limit: int) -> None:
        """Start with the prompt; `limit` bounds the tokens of prompt, turns and text together."""
        self.prompt_ids = prompt_ids
        self._seed = seed
        self._limit = limit
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[ActionSpan] = []
        self.extras: dict[str, float] = {}
        self.score: float | None = None
        """Score from the agent for dynamic sampling."""

    @property
    def room(self) -> int:
        """The number of tokens that still fit."""
        return self._limit - len(self.prompt_ids) - len(self._token_ids)

    @property
    def turns(self) -> int:
        """The number of sampled turns."""
        return len(self._spans)

    def request(self, max_tokens: int) -> SamplingRequest:
        """The request for the next turn: at most `max_tokens` tokens, and no more than fit.

        The first turn has the episode's seed, so that an episode of one turn equals plain sampling.
        """
        return SamplingRequest(
            self.prompt_ids + self._token_ids, turn_seed(self._seed, self.turns), min(max_tokens, self.room)
        )

    def add_action(self, turn: Completion) -> None:
        """Append a sampled turn unchanged."""
        start = len(self._token_ids)
        self._token_ids += turn.token_ids
        self._logprobs += turn.logprobs
        self._spans.append(ActionSpan(start, len(self._token_ids), turn.policy_version))

    def add_text(self, token_ids: Sequence[int]) -> bool:
        """Append the environment's tokens. The result tells whether they fit and leave room for a token to sample."""
        if len(token_ids) >= self.room:
            return False
        self._token_ids += token_ids
        self._logprobs += [0.0] * len(token_ids)
        return True

    def earn(self, reward: float, *, turn: int = -1) -> None:
        """Add `reward` to a turn (default: the last); EpisodeFailed if it is not finite."""
        if not math.isfinite(reward):
            raise EpisodeFailed(f"the reward is {reward}, and must be finite")
        self._spans[turn] = replace(self._spans[turn], reward=reward)

    def note(self, extras: Mapping[str, float]) -> None:
        """Keep figures to log."""
        self.extras |= {str(name): float(value) for name, value in extras.items()}

    def result(
        self, decode: Callable[[Sequence[int]], str], *, finish_reason: FinishReason, failure: str = ""
    ) -> EpisodeResult:
        """The episode up to its last sampled token."""
        end = self._spans[-1].end if self._spans else 0
        completion = Completion(
            token_ids=ids(self._token_ids[:end]),
            logprobs=floats(self._logprobs[:end]),
            text=decode(self._token_ids[:end]),
            finish_reason=finish_reason,
            policy_version=self._spans[-1].policy_version if self._spans else 0,
            seed=self._seed,
            spans=tuple(self._spans),
            failure=failure,
            extras=dict(self.extras),
            score=self.score,
        )
        return EpisodeResult(self.prompt_ids, completion)


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn of an episode; the first turn has the episode's seed.

    >>> turn_seed(7, 0)
    7
    """
    return derive_seed(seed, "turn", turn) if turn else seed
