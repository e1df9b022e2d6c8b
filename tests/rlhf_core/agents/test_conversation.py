import asyncio
import json
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from starlette.responses import JSONResponse

from rlhf_core.agents.conversation import Conversation, RequestRefused, Transcript, chat_message, tool_use, turn_seed
from rlhf_core.agents.programs import Answer, EpisodeCut, EpisodeFailed
from rlhf_core.data.chat import ChatTemplate
from rlhf_core.types import ActionSpan, Completion, Message
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
    return Conversation(template, engine), engine


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


def test_what_was_sampled_stands_in_the_next_prompt_as_it_is_and_only_new_messages_are_tokenised():
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


def said(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


HI, ANSWERED = ("user", "What is 3?"), ("assistant", "It is 42.")


@pytest.mark.parametrize(
    ("first", "then", "code"),
    [
        (("chat", said(HI)), ("chat", said(("user", "What is 4?"), ANSWERED, HI)), "history"),
        (("chat", said(HI)), ("chat", said(HI, ("assistant", "It is 43."), HI)), "history"),
        (("chat", said(HI)), ("chat", said(HI, ANSWERED)), "history"),
        (("chat", said(HI)), ("chat", said(HI, ANSWERED, ("assistant", "Yes."))), "history"),
        (("chat", said(HI)), ("chat", said(HI, HI)), "history"),
        (("chat", said(HI)), ("chat", said(HI, ANSWERED, HI), [TOOL]), "tools"),
        (("chat", said(HI)), ("continue_text", "It is"), "mixed"),
        (("continue_text", [5, 6]), ("chat", said(HI)), "mixed"),
        (("continue_text", [5, 6]), ("continue_text", [5, 6, 7, 8]), "history"),
        (("continue_text", "It is"), ("continue_text", "It was"), "history"),
        (None, ("chat", said(HI), [TOOL]), "template"),  # whose template shows no tools
        (None, ("chat", []), "messages"),
    ],
)
def test_a_request_that_has_no_exact_tokens_is_refused(first, then, code):
    captured, engine = conversation("It is 42.", "Never said.")

    async def ask() -> None:
        for kind, given, *tools in [one for one in (first, then) if one]:
            await getattr(captured, kind)(given, **({"tools": tools[0]} if tools else {}))

    with pytest.raises(RequestRefused) as refusal:
        finish(ask())
    assert refusal.value.code == code and len(engine.asked) == len(captured.turns) == (first is not None)


def test_the_same_request_again_is_the_same_turn():
    async def ask(captured: Conversation) -> list[Any]:
        together = await asyncio.gather(captured.chat([USER]), captured.chat([USER]))
        return [*together, await captured.chat([USER])]

    captured, engine = conversation("It is 42.")
    first, *others = finish(ask(captured))
    assert others == [first, first] and len(engine.asked) == len(captured.turns) == 1


def test_a_second_question_while_a_turn_is_sampled_is_refused():
    async def ask(captured: Conversation) -> list[Any]:
        other = [{"role": "user", "content": "Hi"}]
        return await asyncio.gather(captured.chat([USER]), captured.chat(other), return_exceptions=True)

    _, refusal = finish(ask(conversation("It is 42.", "Hello.")[0]))
    assert isinstance(refusal, RequestRefused) and refusal.code == "busy"


@pytest.mark.parametrize(("cut", "asked"), [(True, 1), (False, 2)])
def test_nothing_follows_a_turn_that_was_cut_or_the_last_one(cut, asked):
    captured, engine = conversation("It is 4.", cut=cut)
    with pytest.raises(EpisodeCut):
        finish(two_turns(captured, "It is 4.", [USER]))
    assert captured.cut and len(engine.asked) == asked


def test_a_call_of_a_tool_is_read_and_its_repetition_is_known_again():
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


def test_plain_text_goes_on_from_its_own_tokens():
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


def test_parts_of_text_are_one_text_and_pictures_are_refused():
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
def test_a_message_of_another_form_is_refused(odd):
    with pytest.raises(RequestRefused, match="form of the chat protocol"):
        chat_message(odd)


def test_a_call_with_half_a_surrogate_pair_can_be_answered_and_repeated():
    text = '<tool_call>{"name": "a\\ud83d", "arguments": {"x": "\\ud83d"}}</tool_call>'
    captured, _ = conversation(text, "3", template=with_tools())
    turn = finish(captured.chat([USER], tools=[TOOL]))
    (use,) = turn.message.calls
    assert JSONResponse({"name": use.name, "arguments": use.arguments}).body
    assert tool_use({"name": use.name, "arguments": use.arguments}) == use


# ---------------------------------------------------------------- transcript


def sampled(*token_ids: int) -> Completion:
    return Completion(token_ids, (-0.5,) * len(token_ids), "", "stop", 4, 0)


def decode(token_ids: object) -> str:
    return str(token_ids)


def test_text_fits_only_if_a_token_can_be_sampled_after_it():
    text = Transcript((1, 2), seed=7, limit=8)
    text.add_action(sampled(3, 4))
    assert text.room == 4 and not text.add_text((5, 5, 5, 5))
    assert text.add_text((5, 5, 5)) and text.request(9).max_tokens == 1
    assert text.request(9).prompt_ids == (1, 2, 3, 4, 5, 5, 5)


def test_an_episode_ends_with_its_last_sampled_token():
    text = Transcript((1, 2), seed=7, limit=20)
    text.add_action(sampled(3, 4))
    text.earn(0.5)
    text.add_text((5, 5))
    played = text.result(decode, finish_reason="length", failure="it hung")
    assert played.prompt_ids == (1, 2) and played.completion.token_ids == (3, 4)
    assert played.completion.spans == (ActionSpan(0, 2, 4, 0.5),)
    assert (played.completion.failure, played.completion.seed, played.completion.policy_version) == ("it hung", 7, 4)


def test_an_episode_that_failed_before_its_first_turn_has_no_tokens():
    completion = Transcript((1, 2), seed=7, limit=20).result(decode, finish_reason="stop", failure="no").completion
    assert completion.token_ids == () and completion.spans == ()


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_finite(reward):
    text = Transcript((1, 2), seed=7, limit=20)
    text.add_action(sampled(3))
    with pytest.raises(EpisodeFailed, match="must be finite"):
        text.earn(reward)


def test_every_turn_has_a_seed_of_its_own():
    assert turn_seed(7, 0) == 7
    assert len({turn_seed(7, turn) for turn in range(50)} | {turn_seed(8, turn) for turn in range(50)}) == 100
