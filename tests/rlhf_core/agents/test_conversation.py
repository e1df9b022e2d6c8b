from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from starlette.responses import JSONResponse

from rlhf_core.agents.conversation import Conversation, RequestRefused, chat_message, tool_use
from rlhf_core.agents.programs import Answer, EpisodeCut
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.types import Message
from tests.rlhf_core.agents.scripted import chat

USER = {"role": "user", "content": "What is 3?"}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}


class SpelledEngine:
    """Says texts letter by letter, so that tokenising what it said gives other tokens; keeps what it was asked."""

    def __init__(self, template: ChatTemplate, *texts: str, cut: bool = False) -> None:
        self._template = template
        self._texts = list(texts)
        self._cut = cut
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, prompt_ids: tuple[int, ...], *, max_tokens: int = 0) -> Answer:
        self.asked.append(prompt_ids)
        await asyncio.sleep(0)
        if not self._texts:
            raise EpisodeCut("no turn is left")
        text = self._texts.pop(0)
        ids = [
            one for letter in text for one in self._template.tokenizer(letter, add_special_tokens=False)["input_ids"]
        ]
        ids += [] if self._cut else [self._template.eos_id]
        return Answer(tuple(ids), (-0.5,) * len(ids), text, "length" if self._cut else "stop", 1)


def conversation(
    *texts: str, cut: bool = False, template: ChatTemplate | None = None
) -> tuple[Conversation, SpelledEngine]:
    template = template or chat()
    engine = SpelledEngine(template, *texts, cut=cut)
    return Conversation(template, engine), engine  # type: ignore[arg-type]


def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def with_tools() -> ChatTemplate:
    """Return a template that shows tools."""
    template = chat()
    template.tokenizer.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}" + template.tokenizer.chat_template
    )
    return template


async def two_turns(captured: Conversation, said: str, then: Sequence[dict[str, Any]]) -> None:
    await captured.chat([USER])
    await captured.chat([USER, {"role": "assistant", "content": said}, *then])


def test_what_was_sampled_stands_in_the_next_prompt_as_it_is_and_only_new_messages_are_tokenised() -> None:
    captured, engine = conversation("It is 42.", "It is 3.")
    finish(two_turns(captured, "It is 42.", [{"role": "user", "content": "And now?"}]))
    template, (first, second) = chat(), captured.turns
    assert engine.asked[0] == template.prompt_ids([Message("user", "What is 3?")])
    assert engine.asked[1] == (
        engine.asked[0] + first.answer.token_ids + template.turn_ids([Message("user", "And now?")])
    )
    whole = [Message("user", "What is 3?"), Message("assistant", "It is 42."), Message("user", "And now?")]
    assert template.prompt_ids(whole) != engine.asked[1], "the test needs text that tokenises otherwise"
    assert second.prompt_ids == engine.asked[1]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "What is 4?"}, {"role": "assistant", "content": "It is 42."}, USER],
        [USER, {"role": "assistant", "content": "It is 43."}, USER],
        [USER, {"role": "assistant", "content": "It is 42."}],
        [USER, {"role": "assistant", "content": "It is 42."}, {"role": "assistant", "content": "Yes."}],
        [USER, USER],
    ],
    ids=["other prompt", "other answer", "nothing new", "words in its mouth", "answer left out"],
)
def test_another_past_is_refused(messages: list[dict[str, Any]]) -> None:
    async def ask(captured: Conversation) -> None:
        await captured.chat([USER])
        await captured.chat(messages)

    captured, engine = conversation("It is 42.", "Never said.")
    with pytest.raises(RequestRefused) as refusal:
        finish(ask(captured))
    assert refusal.value.code == "history" and len(engine.asked) == 1


def test_the_same_request_again_is_the_same_turn() -> None:
    async def ask(captured: Conversation) -> list[Any]:
        together = await asyncio.gather(captured.chat([USER]), captured.chat([USER]))
        return [*together, await captured.chat([USER])]

    captured, engine = conversation("It is 42.")
    first, *others = finish(ask(captured))
    assert others == [first, first] and len(engine.asked) == len(captured.turns) == 1


def test_a_second_question_while_a_turn_is_sampled_is_refused() -> None:
    async def ask(captured: Conversation) -> list[Any]:
        other = [{"role": "user", "content": "Hi"}]
        return await asyncio.gather(captured.chat([USER]), captured.chat(other), return_exceptions=True)

    _, refusal = finish(ask(conversation("It is 42.", "Hello.")[0]))
    assert isinstance(refusal, RequestRefused) and refusal.code == "busy"


def test_nothing_follows_a_turn_that_was_cut() -> None:
    captured, engine = conversation("It is", "4", cut=True)
    with pytest.raises(EpisodeCut):
        finish(two_turns(captured, "It is", [USER]))
    assert captured.cut and len(engine.asked) == 1


def test_an_episode_without_turns_left_is_cut() -> None:
    captured, _ = conversation("It is 4.")
    with pytest.raises(EpisodeCut):
        finish(two_turns(captured, "It is 4.", [USER]))
    assert captured.cut


def test_a_call_of_a_tool_is_read_and_its_repetition_is_known_again() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    captured, engine = conversation(f"Well. {call}", "3", template=with_tools())

    async def ask() -> Any:
        turn = await captured.chat([USER], tools=[TOOL])
        (use,) = turn.message.calls
        repeated = {"function": {"name": use.name, "arguments": '{"a": 1,   "b": 2}'}}
        messages = [USER, {"role": "assistant", "content": "Well.", "tool_calls": [repeated]}]
        await captured.chat([*messages, {"role": "tool", "tool_call_id": "x", "content": "3"}], tools=[TOOL])
        return turn.message

    said = finish(ask())
    assert said.content == "Well." and json.loads(said.calls[0].arguments) == {"a": 1, "b": 2}
    assert len(engine.asked) == 2 and engine.asked[1][: len(engine.asked[0])] == engine.asked[0]
    assert "Add." in chat().decode(engine.asked[0])


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    with pytest.raises(RequestRefused, match="does not render tools"):
        finish(conversation("4")[0].chat([USER], tools=[TOOL]))


def test_plain_text_goes_on_from_its_own_tokens() -> None:
    captured, engine = conversation(" 42", " 43")

    async def ask() -> None:
        await captured.continue_text("It is")
        await captured.continue_text("It is 42, and then")

    finish(ask())
    tokens = chat().tokenizer
    said = captured.turns[0].answer.token_ids
    assert engine.asked[1] == engine.asked[0] + said + tuple(
        tokens(", and then", add_special_tokens=False)["input_ids"]
    )


def test_tokens_that_begin_otherwise_are_refused() -> None:
    captured, engine = conversation("4", "5")

    async def ask() -> None:
        await captured.continue_text([5, 6])
        await captured.continue_text([5, 6, 7, 8])

    with pytest.raises(RequestRefused) as refusal:
        finish(ask())
    assert refusal.value.code == "history" and engine.asked == [(5, 6)]


def test_messages_and_text_do_not_mix() -> None:
    async def ask(captured: Conversation) -> None:
        await captured.chat([USER])
        await captured.continue_text("It is")

    with pytest.raises(RequestRefused, match="began with messages"):
        finish(ask(conversation("4", "5")[0]))


def test_parts_of_text_are_one_text_and_pictures_are_refused() -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "is 3?"}]
    assert chat_message({"role": "user", "content": parts}) == chat_message(USER)
    assert chat_message({"role": "tool", "content": "half a \ud83d"}).content == "half a ?", "no tokenizer takes it"
    with pytest.raises(RequestRefused, match="reads only text"):
        chat_message({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})


@pytest.mark.parametrize(
    "odd",
    [
        {"role": "user", "content": ["text"]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "tool_calls": [{"id": "x"}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    ],
)
def test_a_message_of_another_form_is_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match="form of the chat protocol"):
        chat_message(odd)


def test_a_call_with_half_a_surrogate_pair_can_be_answered_and_repeated() -> None:
    text = '<tool_call>{"name": "a\\ud83d", "arguments": {"x": "\\ud83d"}}</tool_call>'
    captured, _ = conversation(text, "3", template=with_tools())
    turn = finish(captured.chat([USER], tools=[TOOL]))
    (use,) = turn.message.calls
    assert JSONResponse({"name": use.name, "arguments": use.arguments}).body
    assert tool_use({"name": use.name, "arguments": use.arguments}) == use


def test_tools_that_come_after_the_first_request_are_refused() -> None:
    captured, engine = conversation("It is 42.", "3", template=with_tools())
    said = [USER, {"role": "assistant", "content": "It is 42."}, USER]

    async def ask() -> None:
        await captured.chat([USER])
        await captured.chat(said, tools=[TOOL])

    with pytest.raises(RequestRefused) as refusal:
        finish(ask())
    assert refusal.value.code == "tools" and len(engine.asked) == 1
