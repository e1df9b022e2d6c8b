"""Convert conversations to tokens; the only module that makes loss masks.

A conversation is split into segments where each answer begins (after its generation prompt) and where it ends, and no
token crosses a border between segments. Prompts are split at their earlier answers in the same way. The tokens before
any answer are therefore exactly those that the sampler receives (`prompt_ids`), and the mask is exact.

Each segment is tokenized on its own, unless the tokenizer marks the beginning of a text with a "▁", as if a space came
first (SentencePiece: Llama 2, Zephyr, TinyLlama). Such a segment gets the tokens that it adds to the text before it, or,
if a token of the whole text would cross the border, the tokens that it has inside a running text.

The loss mask selects the content of each assistant turn and its end-of-turn token (the tokenizer's EOS, or another end
that the model declares), but not what the template writes after that token (often a newline).

A template that rewrites earlier turns, as reasoning models' do, has no such mask for a conversation as a whole: each
answer is then an example of its own, after the prompt that the sampler would receive (`examples`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.data.chat_templates import Decoder, declared_ends, other_opening, vocabulary_rows
from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.types import Column, Message, Rollout, TokenSample, ids, joined, mask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# ---------------------------------------------------------------- tool rendering

Rows = list[dict[str, Any]]
UNLIMITED = 1 << 40  # value of `max_length` that cuts nothing: no conversation has so many tokens

_PARAMETERS = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "Probe."}}}
_TOOLS = [{"type": "function", "function": {"name": "probe_tool", "description": "Probe.", "parameters": _PARAMETERS}}]
"""A tool, and below turns with words of their own: what is not in the text that a template makes of them is left out."""
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
        missing = self._silent_role(_QUESTION_AND_ANSWER)
        if missing != "":
            self.in_parts = True
            still = self._silent_role(_QUESTION_AND_ANSWER)
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
            if system and self._silent_role([_SYSTEM, *_QUESTION_AND_ANSWER]):
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
            roles, rule = [row["role"] for row in rows], f"the chat template rejects them ({error})"
            raise DataError("messages.role", roles, rule, "change the turns") from error

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
        return ConfigError("chat_template", str(self._tokenizer.name_or_path), rule, remedy)


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
    """Return the tools, calls and results in a conversation that the template omits; empty if none.

    `render` gives the text of rows and tools, with a generation prompt or without. A call must also end with `eos`:
    a turn without it has no end that could be learned.
    """
    own = _TOOLS if tools else []
    if tools and "probe_tool" not in render([_USER], _TOOLS, True):
        return "the tools"
    if any("tool_calls" in row for row in rows):
        before, after = render([_USER], _TOOLS, True), render([_USER, _CALLING], _TOOLS, False)
        said = after.removeprefix(before) if tools else render([_USER, _CALLING], [], False)
        if any(text not in said for text in ("probe_tool", "probe_key", "probe_value")):
            return "the assistant's tool calls"
        if eos not in said:
            return "the end of the turn of a tool call (the tokenizer's EOS)"
        if speaks_and_calls(rows) and "probe_words" not in render([_USER, _SPEAKING], own, False):
            return "the assistant's words beside a tool call"
    results = any(row["role"] == "tool" for row in rows)
    shown = not results or "probe_result" in render([_USER, _CALLING, _RESULT], _TOOLS, True)
    return "" if shown else "the results of tools"


# ---------------------------------------------------------------- pieces

MARKS = ("▁", "Ġ")  # marks that such a tokenizer writes for a space, and therefore at the beginning of a text
ANCHORS = ("\n", "a", ".", "0")
"""Texts to put before a piece when it is tokenized, in order of preference; the first that does not merge is used."""

Ids = Column[int]


def encode(tokenizer: Any, text: str) -> Ids:
    """Return the tokens of a whole text, without adding special tokens."""
    return ids(tokenizer(text, add_special_tokens=False)["input_ids"])


def marks_beginning(tokenizer: Any) -> bool:
    """Return whether `tokenizer` writes a mark before a text that begins with a letter."""
    first = tokenizer.convert_ids_to_tokens(list(encode(tokenizer, "a")))[:1]
    return any(str(token).startswith(MARKS) for token in first)


def difference(encoded: Callable[[str], Ids], before: str, text: str) -> Ids | None:
    """Return the tokens that `text` adds to those of `before`, or None if a token crosses the border."""
    head, whole = encoded(before), encoded(before + text)
    return whole[len(head) :] if whole[: len(head)] == head else None


def continued(tokenizer: Any, text: str) -> Ids:
    """Return the tokens of `text` inside a running text, none of which crosses its beginning."""
    if not marks_beginning(tokenizer):
        return encode(tokenizer, text)
    for anchor in ANCHORS:
        added = difference(lambda whole: encode(tokenizer, whole), anchor, text)
        if added is not None:
            return added
    rule = "in the middle of a text, this tokenizer merges it with the tokens before it"
    raise DataError("text", text[:80], rule, "start it with a line break")


def following(tokenizer: Any, text: str, *, after: int) -> Ids:
    """Return the tokens of `text` after the token `after`, which does not change.

    For some tokenizers an added token, special or not, ends a text, so they mark the beginning of the text after it.
    """
    if marks_beginning(tokenizer) and after in tokenizer.added_tokens_decoder:
        before = str(tokenizer.convert_ids_to_tokens(after))
        added = difference(lambda whole: encode(tokenizer, whole), before, text)
        if added is not None:
            return added
    return continued(tokenizer, text)


def token_text(tokenizer: Any, token: int, *, skip_special_tokens: bool) -> str:
    """Return the text of one token inside a running text, including the space that it may begin with."""
    before = encode(tokenizer, "a") if marks_beginning(tokenizer) else ids(())
    # If a tokenizer marks beginnings, its decoder drops the space of the first token.
    shown = str(tokenizer.decode([*before, token], skip_special_tokens=skip_special_tokens))
    return shown[len(str(tokenizer.decode(list(before)))) :] if before else shown


# ---------------------------------------------------------------- conversations

CHATML_LIKE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Template for tokenizers without one, used only if the profile selects it (`chat_template = "chatml"`).

Roles are ordinary text and a turn ends with the tokenizer's own EOS, so no token is added to the vocabulary:

    <|user|>
    Hi</s>
    <|assistant|>
    Hello.</s>
"""

_REMEMBERED = 32  # number of texts whose tokens are cached: a prompt has three texts for each earlier answer

_KEEPS_TURNS = "give a template that keeps earlier turns as they were (prepare_data.chat_template)"
_PROBE = (Message("user", "Hi"), Message("assistant", "Hello"))
_ANSWERED = (Message("user", "Hi"), Message("assistant", "An-answer-like-no-other"))


class RewrittenTurns(DataError):
    """The template shows an earlier answer in other words once later turns follow it."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the policy in `folder`. Nothing is downloaded."""
    # Five seconds: agents and reward servers import this module, and most of them tokenize nothing.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


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
        self._renderer = Renderer(self.tokenizer, tools=tools)
        self.eos_id = self._end_of_turn(self.ends)
        self._eos = str(self.tokenizer.convert_ids_to_tokens(self.eos_id))
        self.decode = Decoder(self.tokenizer, ends=self.ends)

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Return the template of the policy in `folder` (`tokenizer.json`, `chat_template.jinja`)."""
        if not folder.is_dir():
            raise ConfigError("policy", str(folder), "is not a folder", "give the folder of a policy")
        return cls(load_tokenizer(folder), ends=declared_ends(folder), rows=vocabulary_rows(folder))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        """Return this template with `tools` (JSON schemas) in its prompts. Raises ConfigError if it omits them."""
        if not tools:
            return self
        shown = ChatTemplate(self.tokenizer, tools=tools, ends=self.ends, rows=self._rows)
        if shown.prompt_text(_PROBE[:1]) == self.prompt_text(_PROBE[:1]):
            rule = f"the chat template of {self.tokenizer.name_or_path} does not render tools"
            raise ConfigError("chat_template", len(tools), rule, "give a template that renders `tools`")
        return shown

    @property
    def digest(self) -> str:
        """The SHA-256 of the tokenizer, the template and the special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(self.tokenizer.get_vocab().items()))
        parts = [vocabulary, str(self.tokenizer.chat_template), str(self.eos_id), str(self.pad_id)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def prompt_ids(self, messages: Sequence[Message]) -> Ids:
        """Return the tokens of `messages` and the generation prompt: those of `conversation` before an answer."""
        return joined(*self._pieces(self._cut(messages, self.prompt_text(messages))))

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """Return the text of `prompt_ids`."""
        return self._render(messages, generation_prompt=True)

    def turn_ids(self, messages: Sequence[Message]) -> Ids:
        """Return the tokens that follow an answer's EOS when `messages` come next, with the next generation prompt.

        The tokens are what a conversation with a known answer adds after the end of that answer. The policy's own
        answer is never rendered, so a template may show earlier turns differently (without their reasoning, for
        example). Raises DataError if the template changes what it writes after an EOS.
        """
        before = self._after_answer(self._render(_ANSWERED, generation_prompt=False))
        after = self._after_answer(self._render([*_ANSWERED, *messages], generation_prompt=True))
        if before is None or after is None or not after.startswith(before):
            rule = "renders the end of an answer differently when these turns follow it"
            raise DataError("chat_template", [message.role for message in messages], rule, _KEEPS_TURNS)
        return self._after(self._eos, after)

    def following_ids(self, text: str, *, after: int) -> Ids:
        """Return the tokens of plain `text` after the token `after`, which was sampled or is the last of a prompt."""
        return following(self.tokenizer, text, after=after)

    def conversation(self, messages: Sequence[Message], *, max_length: int) -> TokenSample | None:
        """Return the conversation cut to `max_length` tokens, training each assistant turn and its end-of-turn token.

        Returns None if no trained token is left. Raises DataError if the template changes earlier turns.
        """
        return self._sample(self._segments(messages, answers_from=0), max_length=max_length)

    def examples(self, messages: Sequence[Message], *, max_length: int) -> list[TokenSample]:
        """Return the conversation as samples that together train each assistant turn once, cut to `max_length` tokens.

        One sample, unless the template rewrites earlier turns (without their reasoning, say): then one for each assistant
        turn, after the prompt that the sampler would receive. Samples without a trained token are left out.
        """
        try:
            made = [self.conversation(messages, max_length=max_length)]
        except RewrittenTurns:
            turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
            made = [
                self.continuation(messages[:index], messages[index : index + 1], max_length=max_length)
                for index in turns
            ]
        return [sample for sample in made if sample is not None]

    def transcript(self, messages: Sequence[Message], *, max_length: int) -> TokenSample | None:
        """Return the tokens of `conversation`, all but the first trained, or None if there are fewer than two.

        Where the template rewrites earlier turns, they are the tokens of the whole text as it shows them at the end.
        """
        try:
            texts = [text for text, _ in self._segments(messages, answers_from=0)]
        except RewrittenTurns:
            texts = [self._render(messages, generation_prompt=False)]
        token_ids = joined(*self._pieces(texts))[:max_length]
        return TokenSample(token_ids, mask(b"\0" + b"\1" * (len(token_ids) - 1))) if len(token_ids) > 1 else None

    def continuation(
        self, prompt_messages: Sequence[Message], answer_messages: Sequence[Message], *, max_length: int
    ) -> TokenSample | None:
        """Return prompt and answer cut to `max_length` tokens, with only the answer's assistant turns trained.

        Returns None if no trained token is left. The tokens before the answer are `prompt_ids(prompt_messages)`.
        """
        messages = [*prompt_messages, *answer_messages]
        return self._sample(self._segments(messages, answers_from=len(prompt_messages)), max_length=max_length)

    def answered_ids(self, prompt: str, answer: str) -> Ids:
        """Return the tokens of a user message and its answer, up to and including the end-of-turn token."""
        ask, reply = Message("user", prompt), Message("assistant", answer)
        text, said = (text for text, _ in self._segments((ask, reply), answers_from=0)[:2])
        tokens = self._after(text, said)
        return self._encode(text) + tokens[: len(tokens) - tokens[::-1].index(self.eos_id)]

    def preview(self, sample: TokenSample) -> str:
        """Return the text of `sample`, special tokens included, with each run of trained tokens inside 【 】."""
        parts: list[str] = []
        pairs = zip(sample.token_ids, sample.loss_mask, strict=True)
        for trained, run in groupby(pairs, key=lambda pair: pair[1]):
            text = str(self.tokenizer.decode([token for token, _ in run], skip_special_tokens=False))
            parts.append(f"【{text}】" if trained else text)
        return "".join(parts)

    # ------------------------------------------------------------ private

    def _render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        return self._renderer(messages, generation_prompt=generation_prompt, eos=self._eos)

    def _after_answer(self, rendered: str) -> str | None:
        """Return the text after the end of the answer of `_ANSWERED`, or None if the answer is missing."""
        _, found, rest = rendered.partition(_ANSWERED[1].content)
        _, ended, rest = rest.partition(self._eos)
        return rest if found and ended else None

    def _segments(self, messages: Sequence[Message], *, answers_from: int) -> list[tuple[str, bool]]:
        """Return (text, is an answer) pieces that join to the rendered conversation.

        Assistant turns before the index `answers_from` are part of the prompt, which is split as in `prompt_ids`.
        """
        whole = self._render(messages, generation_prompt=False)
        segments: list[tuple[str, bool]] = []
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
            segments += [*((text, False) for text in asked), (whole[len(before) : len(after)], True)]
            done = len(after)
        segments.append((whole[done:], False))
        return [(text, answer) for text, answer in segments if text]

    def _cut(self, messages: Sequence[Message], prompt: str) -> list[str]:
        """Split `prompt`, the text of `messages`, where each earlier answer begins and where it ends.

        A prompt that `_segments` can split into trained answers is split here at the same places. Any other prompt
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
        # Templates may fail on an empty conversation. The text that opens an answer is what a generation prompt adds.
        closed = self._render(_PROBE[:1], generation_prompt=False)
        opened = self._render(_PROBE[:1], generation_prompt=True)
        alone, opening = self._render(_PROBE[1:], generation_prompt=False), opened.removeprefix(closed)
        if not opening:  # a template of plain text writes nothing between a prompt and its answer
            return alone.partition(_PROBE[1].content)[0]
        start = alone.partition(opening)
        return start[0] + start[1]

    def _pieces(self, texts: Sequence[str]) -> list[Ids]:
        """Return the tokens of each of several consecutive texts."""
        before = ["".join(texts[:number]) for number in range(len(texts))]
        return [self._after(said, text) for said, text in zip(before, texts, strict=True)]

    def _after(self, before: str, text: str) -> Ids:
        """Return the tokens of `text` after the text `before`, without changing the tokens of `before`."""
        if not before or not self._marks_beginning:
            return self._encode(text)
        added = difference(self._encode, before, text)
        return continued(self.tokenizer, text) if added is None else added

    def _encode(self, text: str) -> Ids:
        # Cache the latest texts: both answers of a pair follow the same prompt, and most uses follow a length check.
        if text not in self._recent:
            while len(self._recent) >= _REMEMBERED:
                del self._recent[next(iter(self._recent))]  # the oldest
            tokens = encode(self.tokenizer, text)
            if self._rows is not None and max(tokens, default=0) >= self._rows:
                token = self.tokenizer.convert_ids_to_tokens(max(tokens))
                rule = f"is token {max(tokens)} of the tokenizer, but the model has embeddings for {self._rows} tokens"
                remedy = "use the tokenizer that belongs to the model, or resize its embeddings and train them"
                raise ConfigError("tokenizer", token, rule, remedy)
            self._recent[text] = tokens
        return self._recent[text]

    def _sample(self, segments: Sequence[tuple[str, bool]], *, max_length: int) -> TokenSample | None:
        token_ids: list[int] = []
        loss_mask: list[int] = []
        pieces = self._pieces([text for text, _ in segments])
        for (_, trained), tokens in zip(segments, pieces, strict=True):
            # The last EOS ends the turn. What the template writes after it belongs to the next turn.
            end = len(tokens) - tokens[::-1].index(self.eos_id) if trained and self.eos_id in tokens else 0
            token_ids += tokens
            loss_mask += [1] * end + [0] * (len(tokens) - end)
        if loss_mask:
            loss_mask[0] = 0  # position 0 has no prediction
        if not any(loss_mask[:max_length]):
            return None
        return TokenSample(ids(token_ids[:max_length]), mask(loss_mask[:max_length]))

    def _end_of_turn(self, ends: frozenset[int]) -> int:
        """Return the first token of `ends` in an answer. ConfigError if there is none: sampling would not stop."""
        try:
            answer = "".join(text for text, trained in self._segments(_PROBE, answers_from=0) if trained)
        except DataError as error:
            raise ConfigError(str(error)) from error
        found = [token for token in self._encode(answer) if token in ends]
        if not found:
            rule = f"the chat template ends an answer with {answer[-30:]!r}, which contains no EOS token"
            remedy = "make the end-of-turn token the tokenizer's eos_token, or give another chat template"
            rule = f"{rule}: sampling would not stop"
            raise ConfigError("eos_token", self.tokenizer.eos_token, rule, remedy)
        return found[0]


# ---------------------------------------------------------------- answers


def answer_message(rollout: Rollout) -> Message:
    """Return the answer as one assistant message. Raises DataError for an episode in which an environment wrote tokens.

    In one message, the environment's text would be trained on as if it were the policy's, and the turns would be lost.
    """
    completion = rollout.completion
    if not all(completion.action_mask):
        written = f"{completion.action_mask.count(0)} of its {len(completion.token_ids)} tokens"
        rule = f"{written} come from an environment, and one message of the assistant cannot contain an episode"
        remedy = "train on episodes with ppo, or generate without an agent"
        raise DataError("rollouts", rollout.prompt.id, rule, remedy)
    return Message("assistant", completion.text)
