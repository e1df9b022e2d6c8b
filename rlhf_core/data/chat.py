"""Convert conversations to tokens; the only module that makes loss masks.

A conversation is split into segments where each answer begins (after its generation prompt) and where it ends, and no
token crosses a border between segments. Prompts are split at their earlier answers in the same way. The tokens before
any answer are therefore exactly the sampler's input (`prompt_ids`), and the mask is exact.

Each segment is tokenized separately, unless the tokenizer marks the beginning of a text with a "▁", as if a space came
first (SentencePiece: Llama 2, Zephyr, TinyLlama). Such a segment gets the tokens that it adds to the text before it,
or, if a token of the whole text would cross the border, the tokens that it has inside a running text.

The loss mask selects the content of each assistant turn and its end-of-turn token (the tokenizer's EOS, or another end
that the model declares), but not what the template writes after that token (often a newline).

A template that rewrites earlier turns, as reasoning models' do, has no such mask for a conversation as a whole: each
answer is then a separate example, after the prompt that the sampler would receive (`examples`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlhf_core.data.chat_templates import (
    CHATML,
    SHIPPED,
    Decoder,
    declared_ends,
    other_opening,
    shipped_for,
    vocabulary_rows,
)
from rlhf_core.data.pieces import Ids, continued, difference, encode_all, following, marks_beginning
from rlhf_core.data.token_bounds import TokenBounds, token_bounds
from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.pretrained import load_tokenizer
from rlhf_core.types import Message, Rollout, TokenSample, ids, joined, mask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ---------------------------------------------------------------- tool rendering

Rows = list[dict[str, Any]]
SETTINGS, TEMPLATE = "chat_template_kwargs", "chat_template"
"""Fields of a conversation's first message: arguments of its chat template, and a template to use instead."""
UNLIMITED = 1 << 40  # value of `max_length` that cuts nothing: no conversation has so many tokens

_PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "Probe."}}}
_TOOLS = [{"type": "function", "function": {"name": "probe_tool", "description": "Probe.", "parameters": _PARAMETERS}}]
"""A probe tool. The turns below contain probe words, too: a word missing from the rendered text is one the template
omits."""
_CALL = {
    "type": "function",
    "id": "probe0001",
    "function": {"name": "probe_tool", "arguments": {"probe_key": "probe_value"}},
}
_QUESTION_AND_ANSWER: Rows = [
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
_RESULT: dict[str, Any] = {"role": "tool", "content": "probe_result", "name": "probe_tool", "tool_call_id": "probe0001"}

_TODAY = datetime(2024, 7, 26)
"""Date that templates print as today's (the same as in Llama 3), so that tokens do not depend on the day of a run."""


class Renderer:
    """The chat template of `tokenizer`, with `tools` (JSON schemas) in every conversation.

    Some templates, for example of multimodal models, render contents only as lists of parts and omit plain text. They
    get `[{"type": "text", "text": ...}]` (`in_parts`). Raises ConfigError if a template renders the words of a user or
    of an answer in neither form. System turns, further questions, tools, calls and results are checked when a
    conversation first has any.
    """

    def __init__(self, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._checked: set[tuple[object, ...]] = set()
        self.in_parts = False
        missing = self._silent_role(_QUESTION_AND_ANSWER)
        if missing != "":
            self.in_parts = True
            still = self._silent_role(_QUESTION_AND_ANSWER)
            self.in_parts = still == ""
            if not self.in_parts and missing:
                raise self._refused(f"the words of the role {still or missing}", "conversations")

    def __call__(self, messages: Sequence[Message], *, generation_prompt: bool, ends: Sequence[str]) -> str:
        """The text of a conversation.

        A turn of tool calls must end with one of `ends`. Raises DataError if it is rejected.
        """
        rows, tools = template_rows(messages)
        settings = read_settings(messages)
        self._check_settings(settings)
        system = any(message.role == "system" for message in messages)
        again = sum(message.role == "user" for message in messages) > 1
        used = (
            system,
            again,
            settings.get(TEMPLATE),
            *(_uses(rows, tools) if any(message.tool_fields for message in messages) else ()),
        )
        if any(used) and used not in self._checked:
            if TEMPLATE in settings and (missing := self._silent_role(_QUESTION_AND_ANSWER, settings)):
                raise self._refused(f"the words of the role {missing}", "conversations")
            if system and self._silent_role([_SYSTEM, *_QUESTION_AND_ANSWER], settings):
                raise self._refused("the words of the role system", "conversations with a system turn")
            if again and self._silent_role(_GOING_ON, settings):
                raise self._refused("every question of a user", "conversations of several")
            missing = left_out(rows, tools, partial(self.apply, settings=settings), ends) if len(used) > 3 else ""
            if missing:
                raise self._refused(missing, "conversations with tools")
            self._checked.add(used)
        return self.apply(rows, [*self._tools, *tools], generation_prompt, settings)

    def apply(
        self,
        rows: Rows,
        tools: list[dict[str, Any]],
        generation_prompt: bool,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Render rows and tools with the template and the `settings` of the conversation."""
        try:
            # An argument of this name replaces the clock that transformers passes to templates.
            return str(
                self._tokenizer.apply_chat_template(
                    as_parts(rows) if self.in_parts else rows,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    strftime_now=_TODAY.strftime,
                    **settings,
                )
            )
        except Exception as error:  # templates raise their own errors, e.g. for an unsupported system turn
            roles, rule = [row["role"] for row in rows], f"the chat template rejects them ({error})"
            raise DataError("messages.role", roles, rule, "change the turns") from error

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise ConfigError for a variable that the template does not read, or that the model's template sets itself."""
        template = str(settings.get(TEMPLATE) or self._tokenizer.chat_template)
        for name in settings.keys() - {TEMPLATE}:
            fixed = re.search(rf"{{%-? set {name} =", template)
            if fixed or not re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", template):
                rule = "the chat template sets it itself" if fixed else "the chat template reads no such variable"
                raise ConfigError(
                    f"chat_template_kwargs.{name}", settings[name], rule, "remove it, or change the template"
                )

    def _silent_role(self, rows: Rows, settings: Mapping[str, Any] = MappingProxyType({})) -> str | None:
        """The first role of `rows` whose words the template leaves out, "" if none, and None if it rejects the rows."""
        try:
            text = self.apply(rows, [], False, settings)
        except DataError:  # raised again, with its reason, when the conversation is rendered
            return None
        return next((row["role"] for row in rows if row["content"] not in text), "")

    def _refused(self, missing: str, use: str) -> ConfigError:
        rule = f"the template does not render {missing}, so {use} cannot be trained on"
        remedy = "give a template that does (prepare_data.chat_template), or leave these rows out of the source"
        return ConfigError("chat_template", str(self._tokenizer.name_or_path), rule, remedy)


def as_parts(rows: Rows) -> Rows:
    """Convert each content of `rows` to a list of parts.

    >>> as_parts([{"role": "user", "content": "Hi"}])
    [{'role': 'user', 'content': [{'type': 'text', 'text': 'Hi'}]}]
    """
    return [{**row, "content": [{"type": "text", "text": row["content"]}]} for row in rows]


def read_settings(messages: Sequence[Message]) -> dict[str, Any]:
    """The arguments of the chat template that the first message of a conversation holds.

    >>> read_settings([put_settings(Message("user", "Hi"), {"enable_thinking": False})])
    {'enable_thinking': False}
    """
    if not messages or SETTINGS not in messages[0].tool_fields:
        return {}
    found: dict[str, Any] = json.loads(messages[0].tool_fields).get(SETTINGS, {})
    name = found.get(TEMPLATE)
    return found | ({TEMPLATE: {CHATML: CHATML_LIKE, **SHIPPED}.get(name, name)} if name else {})


def put_settings(message: Message, settings: Mapping[str, Any]) -> Message:
    """The message, with `settings` for the chat template in place of others."""
    if not settings and SETTINGS not in message.tool_fields:
        return message
    fields = json.loads(message.tool_fields) if message.tool_fields else {}
    fields.pop(SETTINGS, None)
    fields |= {SETTINGS: dict(settings)} if settings else {}
    return replace(message, tool_fields=json.dumps(fields, ensure_ascii=False, sort_keys=True) if fields else "")


def template_rows(messages: Sequence[Message]) -> tuple[Rows, list[dict[str, Any]]]:
    """Convert messages to the rows that templates read, and collect the tools that the first message holds.

    >>> template_rows([Message("user", "Hi", '{"tools": [{"type": "function"}]}')])
    ([{'role': 'user', 'content': 'Hi'}], [{'type': 'function'}])
    """
    rows: Rows = []
    tools: list[dict[str, Any]] = []
    for message in messages:
        fields = json.loads(message.tool_fields) if message.tool_fields else {}
        tools += fields.pop("tools", [])
        fields.pop(SETTINGS, None)
        rows.append({"role": message.role, "content": message.content, **fields})
    return rows, tools


def speaks_and_calls(rows: Rows) -> bool:
    """Whether a turn has words in addition to its tool calls. Some templates omit such words."""
    return any("tool_calls" in row and row["content"].strip() for row in rows)


def _uses(rows: Rows, tools: Sequence[dict[str, Any]]) -> tuple[bool, ...]:
    """Whether a conversation has tools, tool calls, words next to its calls, and tool results."""
    calls, results = any("tool_calls" in row for row in rows), any(row["role"] == "tool" for row in rows)
    return bool(tools), calls, speaks_and_calls(rows), results


def left_out(
    rows: Rows,
    tools: Sequence[dict[str, Any]],
    render: Callable[[Rows, list[dict[str, Any]], bool], str],
    ends: Sequence[str],
) -> str:
    """Find the tools, calls or results in a conversation that the template omits; empty if none.

    `render` renders rows and tools to text, with a generation prompt or without. A call must also end with one of
    `ends`; otherwise the policy could not learn to end the turn.
    """
    own = _TOOLS if tools else []
    if tools and "probe_tool" not in render([_USER], _TOOLS, True):
        return "the tools"
    if any("tool_calls" in row for row in rows):
        said = render([_USER, _CALLING], own, False).removeprefix(render([_USER], own, True))
        if any(text not in said for text in ("probe_tool", "probe_key", "probe_value")):
            return "the assistant's tool calls"
        if not any(end in said for end in ends):
            return "the end of the turn of a tool call (the tokenizer's EOS, or another declared end token)"
        if speaks_and_calls(rows) and "probe_words" not in render([_USER, _SPEAKING], own, False):
            return "the assistant's words beside a tool call"
    results = any(row["role"] == "tool" for row in rows)
    shown = not results or "probe_result" in render([_USER, _CALLING, _RESULT], _TOOLS, True)
    return "" if shown else "the results of tools"


# ---------------------------------------------------------------- conversations

CHATML_LIKE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Template for tokenizers without one, used only if the profile selects it (`chat_template = "chatml"`).

Roles are ordinary text and a turn ends with the tokenizer's EOS, so no token is added to the vocabulary:

    <|user|>
    Hi</s>
    <|assistant|>
    Hello.</s>
"""

Segments = list[tuple[str, bool]]
"""Consecutive pieces of a rendered conversation, each with whether it is an answer to train on."""

_REMEMBERED = 32  # number of texts whose tokens are cached: a prompt has three texts for each earlier answer

_KEEPS_TURNS = "give a template that keeps earlier turns as they were (prepare_data.chat_template)"
_PROBE = (Message("user", "Hi"), Message("assistant", "Hello"))
_ANSWERED = (Message("user", "Hi"), Message("assistant", "An-answer-like-no-other"))


class RewrittenTurns(DataError):
    """The template shows an earlier answer in other words once later turns follow it."""


class ChatTemplate:
    """A tokenizer with its chat template, loaded from a policy's folder.

    >>> ChatTemplate.load(folder).prompt_ids((Message("user", "Hi"),))    # doctest: +SKIP
    (1, 42, 43, 4, 2)
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        ends: Iterable[int] = (),
        rows: int | None = None,
    ) -> None:
        """Check that `tokenizer` has a template and a token that ends each assistant turn. Raises ConfigError otherwise.

        `tools` are JSON schemas that every prompt shows to the policy. `ends` are the ids, besides the tokenizer's EOS,
        at which sampling stops; the first of them in an answer is `eos_id`. `rows` is the number of tokens that the
        model knows: others in a text or the template are refused.
        """
        self.tokenizer: Any = tokenizer
        self._recent: dict[str, Ids] = {}
        self._rows = rows
        self._marks_beginning = marks_beginning(self.tokenizer)
        name = str(self.tokenizer.name_or_path)
        if not self.tokenizer.chat_template:
            rule = f"the tokenizer of {name} has no chat template"
            remedy = 'set prepare_data.chat_template = "chatml" or give the path of a Jinja file'
            raise ConfigError("chat_template", None, rule, remedy)
        if self.tokenizer.eos_token_id is None:
            rule = f"the tokenizer of {name} has no EOS token"
            raise ConfigError("eos_token", None, rule, "set eos_token in its config")
        eos_id = int(self.tokenizer.eos_token_id)
        self.pad_id = eos_id if self.tokenizer.pad_token_id is None else int(self.tokenizer.pad_token_id)
        self.ends = frozenset({eos_id, *ends})
        self._eos = ""  # not known before the first answer is rendered
        self.end_texts = [str(self.tokenizer.convert_ids_to_tokens(end)) for end in sorted(self.ends)]
        self._renderer = Renderer(self.tokenizer, tools=tools)
        self.eos_id = self._end_of_turn(self.ends)
        self._eos = str(self.tokenizer.convert_ids_to_tokens(self.eos_id))
        self.decode = Decoder(self.tokenizer, ends=self.ends)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Load the template of the policy in `folder` (`tokenizer.json`, `chat_template.jinja`)."""
        if not folder.is_dir():
            raise ConfigError("policy", str(folder), "is not a folder", "give the folder of a policy")
        return cls(load_tokenizer(folder), ends=declared_ends(folder), rows=vocabulary_rows(folder))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """A copy of this template with `tools` (JSON schemas) in its prompts.

        Raises ConfigError if the template omits them.
        """
        if not tools:
            return self
        shown = ChatTemplate(self.tokenizer, tools=tools, ends=self.ends, rows=self._rows)
        if shown.prompt_text(_PROBE[:1]) == self.prompt_text(_PROBE[:1]):
            rule = f"the chat template of {self.tokenizer.name_or_path} does not render tools"
            raise ConfigError("chat_template", len(tools), rule, "give a template that renders `tools`")
        return shown

    def token_bounds(self) -> TokenBounds | None:
        """Bounds on the number of tokens of a text from its length, or None if they are not certain."""
        return token_bounds(self.tokenizer, end=self._eos, rows=self._rows)

    @property
    def digest(self) -> str:
        """The SHA-256 of the tokenizer, the template and the special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        parts = [vocabulary, str(self.tokenizer.chat_template), str(self.eos_id), str(self.pad_id)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def prompt_ids(self, messages: Sequence[Message]) -> Ids:
        """The tokens of `messages` and the generation prompt, as `conversation` has them before an answer."""
        return joined(*self.pieces(self.prompt_segments(messages)))

    def prompt_segments(self, messages: Sequence[Message]) -> Segments:
        """The pieces of text that `prompt_ids` tokenizes one by one."""
        return [(text, False) for text in self._cut(messages, self.prompt_text(messages))]

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text of `prompt_ids`."""
        return self._render(messages, generation_prompt=True)

    def turn_ids(self, messages: Sequence[Message]) -> Ids:
        """Tokenize the turns that follow an answer's EOS, including the next generation prompt.

        The tokens are found by rendering a known answer with and without `messages` after it. The policy's own answer
        is never rendered, so a template may show earlier turns differently (without their reasoning, for example).
        Raises DataError if the template changes what it writes after an EOS.
        """
        before = self._after_answer(self._render(_ANSWERED, generation_prompt=False))
        after = self._after_answer(self._render([*_ANSWERED, *messages], generation_prompt=True))
        if before is None or after is None or not after.startswith(before):
            rule = "renders the end of an answer differently when these turns follow it"
            raise DataError("chat_template", [message.role for message in messages], rule, _KEEPS_TURNS)
        return self._after(self._eos, after)

    def following_ids(self, text: str, *, after: int) -> Ids:
        """Tokenize plain `text` after the token `after`, which was sampled or ends a prompt."""
        return following(self.tokenizer, text, after=after)

    def conversation(self, messages: Sequence[Message], *, max_length: int) -> TokenSample | None:
        """Tokenize a conversation, cut to `max_length` tokens.

        Each assistant turn with its end-of-turn token is trained.

        The result is None if no trained token is left. Raises DataError if the template changes earlier turns.
        """
        return self.sample(self.segments(messages, answers_from=0), max_length=max_length)

    def examples(self, messages: Sequence[Message], *, max_length: int) -> list[TokenSample]:
        """Tokenize a conversation as samples that together train each assistant turn once, cut to `max_length` tokens.

        Usually this is one sample. If the template rewrites earlier turns (for example, drops their reasoning), it is
        one for each assistant turn, after the prompt that the sampler would receive. Samples without a trained token
        are left out.
        """
        made = [self.sample(segments, max_length=max_length) for segments in self.example_segments(messages)]
        return [sample for sample in made if sample is not None]

    def example_segments(self, messages: Sequence[Message]) -> list[Segments]:
        """The segments of each sample of `examples`."""
        try:
            return [self.segments(messages, answers_from=0)]
        except RewrittenTurns:
            turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
            return [self.segments(messages[: index + 1], answers_from=index) for index in turns]

    def transcript(self, messages: Sequence[Message], *, max_length: int) -> TokenSample | None:
        """The tokens of `conversation`, all but the first trained, or None if there are fewer than two.

        Where the template rewrites earlier turns, they are the tokens of the whole text as it shows them at the end.
        """
        try:
            segments = self.segments(messages, answers_from=0)
        except RewrittenTurns:
            segments = [(self._render(messages, generation_prompt=False), True)]
        token_ids = joined(*self.pieces(segments))[:max_length]
        return TokenSample(token_ids, mask(b"\0" + b"\1" * (len(token_ids) - 1))) if len(token_ids) > 1 else None

    def continuation(
        self, prompt_messages: Sequence[Message], answer_messages: Sequence[Message], *, max_length: int
    ) -> TokenSample | None:
        """Tokenize prompt and answer, cut to `max_length` tokens, with only the answer's assistant turns trained.

        The result is None if no trained token is left. The tokens before the answer are `prompt_ids(prompt_messages)`.
        """
        messages = [*prompt_messages, *answer_messages]
        return self.sample(self.segments(messages, answers_from=len(prompt_messages)), max_length=max_length)

    def answered_ids(self, prompt: str, answer: str) -> Ids:
        """Tokenize a user message and its answer, up to and including the end-of-turn token."""
        ask, reply = Message("user", prompt), Message("assistant", answer)
        text, said = (text for text, _ in self.segments((ask, reply), answers_from=0)[:2])
        tokens = self._after(text, said)
        return self._encode(text) + tokens[: len(tokens) - tokens[::-1].index(self.eos_id)]

    def preview(self, sample: TokenSample) -> str:
        """Decode `sample`, special tokens included, with each run of trained tokens inside 【 】."""
        parts: list[str] = []
        pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
        for trained, run in groupby(pairs, key=lambda pair: pair[1]):
            text = str(self.tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
            parts.append(f"【{text}】" if trained else text)
        return "".join(parts)

    def segments(self, messages: Sequence[Message], *, answers_from: int) -> Segments:
        """Split the rendered conversation into (text, is an answer) pieces.

        Assistant turns before the index `answers_from` are part of the prompt, which is split as in `prompt_ids`.
        """
        whole = self._render(messages, generation_prompt=False)
        segments: Segments = []
        done = 0
        for index, message in enumerate(messages):
            if message.role != "assistant" or index < answers_from:
                continue
            last = index + 1 == len(messages)
            before = self._before_answer(messages[:index])
            after = whole if last else self._render(messages[: index + 1], generation_prompt=False)
            where = f"turn {index + 1} of {len(messages)}"
            if not after.startswith(before):
                opening = other_opening(str(self.tokenizer.chat_template), before, after)
                raise DataError(explain("chat_template", where, *opening))
            if not whole.startswith(after) or len(before) < done:
                rule = "renders differently when later turns follow, so there is no exact loss mask"
                raise RewrittenTurns("chat_template", where, rule, _KEEPS_TURNS)
            asked = [whole[done : len(before)]] if done else self._cut(messages[:index], before)
            answer = whole[len(before) : len(after)]
            # That the model's own template has one is checked when it is loaded.
            if TEMPLATE in read_settings(messages) and not any(end in answer for end in self.end_texts):
                rule = f"ends an answer without an end token of the model ({', '.join(self.end_texts)})"
                raise ConfigError("chat_template", answer[-30:], rule, "end answers with one of them")
            segments += [*((text, False) for text in asked), (answer, True)]
            done = len(after)
        segments.append((whole[done:], False))
        return [(text, answer) for text, answer in segments if text]

    def pieces(self, segments: Segments) -> list[Ids]:
        """The tokens of each of several consecutive segments."""
        texts = [text for text, _ in segments]
        before = ["".join(texts[:number]) for number in range(len(texts))]
        return [self._after(said, text) for said, text in zip(before, texts, strict=True)]

    def encode_ahead(self, conversations: Iterable[Segments]) -> None:
        """Tokenize all segments in one call, so that `pieces` and `sample` of each conversation find their tokens."""
        self._recent.clear()
        texts = ([text for text, _ in segments] for segments in conversations)
        self._remember(text for found in texts for text in (accumulate(found) if self._marks_beginning else found))

    def sample(self, segments: Segments, *, max_length: int) -> TokenSample | None:
        """The sample that segments of one conversation make, cut to `max_length` tokens; None if no token is trained."""
        token_ids: list[int] = []
        loss_mask: list[int] = []
        pieces = self.pieces(segments)
        for (_, trained), tokens in zip(segments, pieces, strict=True):
            # The last EOS ends the turn, or another end token if it has none, as gpt-oss calls. Text that a template
            # writes after it belongs to the next turn.
            found = self.ends.intersection(tokens) if trained else ()
            ends = {self.eos_id} if self.eos_id in found else found
            end = max((at for at, token in enumerate(tokens, start=1) if token in ends), default=0)
            token_ids += tokens
            loss_mask += [1] * end + [0] * (len(tokens) - end)
        if loss_mask:
            loss_mask[0] = 0  # position 0 has no prediction
        if not any(loss_mask[:max_length]):
            return None
        return TokenSample(ids(token_ids[:max_length]), mask(loss_mask[:max_length]))

    # ------------------------------------------------------------ private

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return self._renderer(messages, generation_prompt=generation_prompt, ends=self.end_texts)

    def _after_answer(self, rendered: str) -> str | None:
        """The text after the end of the answer of `_ANSWERED`, or None if the answer is missing."""
        _, found, rest = rendered.partition(_ANSWERED[1].content)
        _, ended, rest = rest.partition(self._eos)
        return rest if found and ended else None

    def _cut(self, messages: Sequence[Message], prompt: str) -> list[str]:
        """Split `prompt`, the text of `messages`, where each earlier answer begins and where it ends.

        A prompt that `segments` can split into trained answers is split here at the same places. Any other prompt
        stays one piece, because its earlier answers are not trained on.
        """
        cuts = [0]
        for index, message in enumerate(messages):
            if message.role != "assistant":
                continue
            try:
                before = self._before_answer(messages[:index])
                after = self._render(messages[: index + 1], generation_prompt=False)
            except DataError:  # the template can render the whole prompt, but not its beginning
                return [prompt]
            if not (after.startswith(before) and prompt.startswith(after) and len(before) >= cuts[-1]):
                return [prompt]
            cuts += [len(before), len(after)]
        pieces = [prompt[start:end] for start, end in pairwise([*cuts, len(prompt)])]
        return [piece for piece in pieces if piece]

    def _before_answer(self, messages: Sequence[Message]) -> str:
        if messages:
            return self._render(messages, generation_prompt=True)
        # Templates may fail on an empty conversation. A generation prompt adds the text that opens an answer.
        closed = self._render(_PROBE[:1], generation_prompt=False)
        opened = self._render(_PROBE[:1], generation_prompt=True)
        alone, opening = self._render(_PROBE[1:], generation_prompt=False), opened.removeprefix(closed)
        if not opening:  # a template of plain text writes nothing between a prompt and its answer
            return alone.partition(_PROBE[1].content)[0]
        start = alone.partition(opening)
        return start[0] + start[1]

    def _after(self, before: str, text: str) -> Ids:
        """Tokenize `text` after the text `before`, without changing the tokens of `before`."""
        if not before or not self._marks_beginning:
            return self._encode(text)
        added = difference(self._encode, before, text)
        return continued(self.tokenizer, text) if added is None else added

    def _encode(self, text: str) -> Ids:
        # Cache the latest texts: both answers of a pair follow the same prompt, and most uses follow a length check.
        if text not in self._recent:
            while len(self._recent) >= _REMEMBERED:
                del self._recent[next(iter(self._recent))]  # the oldest
            self._remember([text])
        return self._recent[text]

    def _remember(self, texts: Iterable[str]) -> None:
        new = list(dict.fromkeys(texts))
        for text, tokens in zip(new, encode_all(self.tokenizer, new), strict=True):
            if self._rows is not None and max(tokens, default=0) >= self._rows:
                token = self.tokenizer.convert_ids_to_tokens(max(tokens))
                rule = f"is token {max(tokens)} of the tokenizer, but the model has embeddings for {self._rows} tokens"
                remedy = "use the tokenizer that belongs to the model, or resize its embeddings and train them"
                raise ConfigError("tokenizer", token, rule, remedy)
            self._recent[text] = tokens

    def _end_of_turn(self, ends: frozenset[int]) -> int:
        """The first token of `ends` in an answer.

        Raises ConfigError if it is missing, since sampling would not stop.
        """
        try:
            answer = "".join(text for text, trained in self.segments(_PROBE, answers_from=0) if trained)
        except DataError as error:
            raise ConfigError(str(error)) from error
        found = [token for token in self._encode(answer) if token in ends]
        if not found:
            rule = f"the chat template ends an answer with {answer[-30:]!r}, which contains no EOS token"
            remedy = "make the end-of-turn token the tokenizer's eos_token, or give another chat template"
            if shipped := shipped_for(str(self.tokenizer.chat_template)):
                remedy = f'set prepare_data.chat_template = "{shipped}", in which each answer ends with such a token'
            rule = f"{rule}: sampling would not stop"
            raise ConfigError("eos_token", self.tokenizer.eos_token, rule, remedy)
        return found[0]


# ---------------------------------------------------------------- answers


def answer_message(rollout: Rollout) -> Message:
    """Convert an answer to one assistant message. Raises DataError for an episode in which an environment wrote tokens.

    In one message, the environment's text would be trained on as if it were the policy's, and the turns would be lost.
    """
    completion = rollout.completion
    if not all(completion.action_mask):
        written = f"{completion.action_mask.count(0)} of its {len(completion.token_ids)} tokens"
        rule = f"{written} come from an environment, and one message of the assistant cannot contain an episode"
        remedy = "train on episodes with ppo, or generate without an agent"
        raise DataError("rollouts", rollout.prompt.id, rule, remedy)
    return Message("assistant", completion.text)
