"""Conversations with tools are rendered by templates that support them, with exact masks, and else refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import Demonstration, content_id, read_demonstrations, write_demonstrations
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import Message, TokenSample

# The parts of Qwen 2.5's template that matter here: results of consecutive tools share one turn of the user.
TOOL_TEMPLATE = """{%- if tools %}{{ '<|system|>\\nTools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ eos_token }}
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|user|>' }}{% endif %}
{{- '\\n<result>' + message.content + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ eos_token + '\\n' }}{% endif %}
{%- else %}{{ '<|' + message.role + '|>\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</call>' }}{% endfor %}
{{- eos_token + '\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
NO_CALLS = TOOL_TEMPLATE.replace("message.tool_calls or []", "[]")
NO_WORDS = TOOL_TEMPLATE.replace(
    "+ message.content }}\n{%- for call", "+ ('' if message.tool_calls else message.content) }}\n{%- for call"
)
NO_END = TOOL_TEMPLATE.replace("{{- eos_token + '\\n' }}", "{{- '' if message.tool_calls else eos_token + '\\n' }}")


def call(a: int) -> str:
    return json.dumps({"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": a}}}]})


SCHEMA = json.dumps({"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]})
ASK = Message("user", "12 + 30?", SCHEMA)
TALK = (ASK, Message("assistant", "I add.", call(12)), Message("tool", "42"), Message("tool", "43"))
TALK = (*TALK, Message("assistant", "", call(30)), Message("tool", "44"), Message("assistant", "It is 42."))


def template(folder: Path, text: str) -> ChatTemplate:
    tokenizer = ChatTemplate.load(folder).tokenizer
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def trained(chat: ChatTemplate, sample: TokenSample) -> list[str]:
    """Return the text of each run of trained tokens."""
    return [part.partition("】")[0] for part in chat.preview(sample).split("【")[1:]]


def sample_of(chat: ChatTemplate, messages: Sequence[Message]) -> TokenSample:
    sample = chat.conversation(messages, max_length=4096)
    assert sample is not None
    return sample


def test_only_what_the_assistant_says_and_calls_is_trained(chat_folder: Path) -> None:
    chat = template(chat_folder, TOOL_TEMPLATE)
    sample = sample_of(chat, TALK)
    eos = chat.tokenizer.eos_token
    assert trained(chat, sample) == [
        f'I add.<call>{{"name": "add", "arguments": {{"a": 12}}}}</call>{eos}',
        f'<call>{{"name": "add", "arguments": {{"a": 30}}}}</call>{eos}',
        f"It is 42.{eos}",
    ]
    whole = chat.tokenizer.decode(list(sample.token_ids), skip_special_tokens=False)
    assert '"name": "add", "parameters": {}' in whole and "<result>43</result>" in whole
    assert list(sample.token_ids[: len(chat.prompt_ids(TALK[:1]))]) == list(chat.prompt_ids(TALK[:1]))


def test_the_last_answer_follows_the_results_that_the_sampler_would_see(chat_folder: Path) -> None:
    chat = template(chat_folder, TOOL_TEMPLATE)
    sample = chat.continuation(TALK[:-1], TALK[-1:], max_length=4096)
    assert sample is not None
    assert sample.token_ids[: sample.loss_mask.index(1)] == chat.prompt_ids(TALK[:-1])


@pytest.mark.parametrize(
    ("text", "missing"),
    [(NO_CALLS, "the assistant's tool calls"), (NO_END, "the end of the turn of a tool call")],
)
def test_a_template_that_leaves_calls_out_is_refused(chat_folder: Path, text: str, missing: str) -> None:
    chat = template(chat_folder, text)
    with pytest.raises(ConfigError, match=f"does not render {missing}.*prepare_data.chat_template"):
        chat.conversation(TALK, max_length=4096)


def test_a_template_that_leaves_out_words_beside_a_call_is_refused_for_rows_that_have_both(chat_folder: Path) -> None:
    chat = template(chat_folder, NO_WORDS)
    calls_alone = (ASK, *TALK[4:])
    assert len(trained(chat, sample_of(chat, calls_alone))) == 2
    with pytest.raises(ConfigError, match="does not render the assistant's words beside a tool call"):
        chat.conversation(TALK, max_length=4096)


def test_a_template_that_leaves_tools_out_is_refused(chatml: ChatTemplate) -> None:
    with pytest.raises(
        ConfigError, match="does not render the tools, so conversations with tools cannot be trained on"
    ):
        chatml.conversation(TALK, max_length=4096)
    without_tools = (Message("user", "12 + 30?"), *TALK[1:])
    with pytest.raises(ConfigError, match="does not render the assistant's tool calls"):
        chatml.conversation(without_tools, max_length=4096)


PARTS = (  # as multimodal models have it: a text is a sequence of characters, none of which has a type
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
STRICT = "{% for m in messages if m['content'] is string %}{{ raise_exception('parts, please') }}{% endfor %}" + PARTS
FIRST = PARTS.replace("{% for part in m['content'] %}", "{% for part in m['content'][:1] %}")
SAID = (Message("system", "Add."), Message("user", "12 + 30?"), Message("assistant", "42"))


@pytest.mark.parametrize("text", [PARTS, STRICT, FIRST])
def test_a_template_that_shows_only_parts_gets_them(chat: ChatTemplate, chat_folder: Path, text: str) -> None:
    parts = template(chat_folder, text)
    assert sample_of(parts, SAID) == sample_of(chat, SAID)
    assert parts.prompt_ids(SAID[:2]) == chat.prompt_ids(SAID[:2])
    assert parts.turn_ids(SAID[1:2]) == chat.turn_ids(SAID[1:2])


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("text", ["{{ m['content'] }}", "{{ m['content'][0]['text'] }}"])
def test_a_template_that_leaves_out_the_words_of_a_role_is_refused(chat_folder: Path, role: str, text: str) -> None:
    silent = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] != '"
        + role
        + "' %}"
        + text
        + "{% endif %}"
        "{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    with pytest.raises(ConfigError, match=f"does not render the words of the role {role}.*prepare_data.chat_template"):
        template(chat_folder, silent).conversation(SAID, max_length=64)
    if role == "system":
        assert template(chat_folder, silent).conversation(SAID[1:], max_length=64)


@pytest.mark.parametrize("shown", ["loop.first", "loop.last", "loop.index0 > 1"])
def test_a_template_that_leaves_out_one_of_several_questions_is_refused(chat_folder: Path, shown: str) -> None:
    words = f"(message.content if {shown} or message.role != 'user' or messages | length < 3 else '')"
    silent = template(chat_folder, TOOL_TEMPLATE.replace("+ message.content }}", f"+ {words} }}}}"))
    assert silent.conversation(SAID[1:], max_length=64)
    with pytest.raises(ConfigError, match="does not render every question of a user"):
        silent.prompt_ids((*SAID[1:], SAID[1]))


def test_demonstrations_keep_tool_calls_and_other_tables_keep_their_bytes(tmp_path: Path) -> None:
    plain = Demonstration("d", (Message("user", "Hi"), Message("assistant", "Hello.")), "s")
    rows = [plain, Demonstration("t", TALK, "s")]
    write_demonstrations(tmp_path / "train.parquet", rows)
    assert read_demonstrations(tmp_path / "train.parquet") == rows
    assert content_id(plain.messages) == "b4c4429930d0be07"  # as before messages could hold tool calls
    assert content_id(TALK) != content_id(tuple(Message(one.role, one.content) for one in TALK))


def test_a_table_without_tool_calls_refuses_them() -> None:
    from rlhf_core.data.shards import plain_messages

    with pytest.raises(DataError, match="this table holds no tool calls; use them in demonstrations"):
        plain_messages(TALK)
