"""Rendering and masks: what is trained is each answer with its end-of-turn token, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from rlhf_core.data.chat import CHATML_LIKE, ChatTemplate, answer_message
from rlhf_core.data.chat_templates import SHIPPED
from rlhf_core.data.shards import plain_messages
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import ActionSpan, Message, TokenSample
from tests.rlhf_core.data.small_tokenizers import FORGETFUL, with_template
from tests.support.workshop import rollout

# ---------------------------------------------------------------- chat

USER, ANSWER = Message("user", "What is 12 + 30?"), Message("assistant", "42")
THANKS, BYE = Message("user", "Thank you."), Message("assistant", "Hello Maria.")


def trained_spans(chat: ChatTemplate, sample: TokenSample) -> list[list[int]]:
    """Return the runs of trained tokens."""
    spans: list[list[int]] = []
    for before, token, trained in zip((0, *sample.loss_mask), sample.token_ids, sample.loss_mask):
        if trained and not before:
            spans.append([])
        if trained:
            spans[-1].append(token)
    return spans


def conversation(chat: ChatTemplate, *messages: Message, max_length: int = 1000) -> TokenSample:
    sample = chat.conversation(messages, max_length=max_length)
    assert sample is not None
    return sample


def golden(chat: ChatTemplate, ids: Any) -> str:
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False))


def test_a_conversation_is_rendered_and_its_answers_are_trained_with_their_ends(chat, chatml):
    for one, line in ((chat, ""), (chatml, "\n")):  # what a template writes after the end of a turn is not trained
        text = golden(one, conversation(one, USER, ANSWER).token_ids)
        assert text == f"<|user|>{line}What is 12 + 30?<|end|>{line}<|assistant|>{line}42<|end|>{line}"
        spans = trained_spans(one, conversation(one, USER, ANSWER, THANKS, BYE))
        assert [golden(one, span) for span in spans] == ["42<|end|>", "Hello Maria.<|end|>"]
        assert [span[-1] for span in spans] == [one.eos_id, one.eos_id]


def test_a_transcript_has_the_tokens_of_the_conversation_and_trains_all_but_the_first(chatml):
    whole = conversation(chatml, USER, ANSWER, THANKS, BYE)
    sample = chatml.transcript([USER, ANSWER, THANKS, BYE], max_length=1000)
    assert sample == TokenSample(whole.token_ids, (0,) + (1,) * (len(whole.token_ids) - 1))
    assert chatml.transcript([USER], max_length=5) == TokenSample(whole.token_ids[:5], (0, 1, 1, 1, 1))
    assert chatml.transcript([USER], max_length=1) is None


def test_a_continuation_is_the_prompt_of_the_sampler_and_the_trained_answer(chatml):
    for prompt in ((USER,), (USER, ANSWER, THANKS)):
        prompt_ids = chatml.prompt_ids(prompt)
        sample = chatml.continuation(prompt, (BYE,), max_length=1000)
        assert sample.token_ids[: len(prompt_ids)] == prompt_ids
        assert sample.loss_mask.index(1) == len(prompt_ids)
        assert [golden(chatml, span) for span in trained_spans(chatml, sample)] == ["Hello Maria.<|end|>"]
        assert golden(chatml, prompt_ids).endswith("<|end|>\n<|assistant|>\n")


def test_the_prompt_is_not_merged_with_the_first_token_of_the_answer(chat):
    glued = with_template(
        chat,
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'H' + m['content'] + eos_token }}"
        "{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'H' }}{% endif %}",
    )
    assert len(glued.tokenizer("Hello", add_special_tokens=False)["input_ids"]) == 1  # H and ello would merge
    sample = glued.continuation((USER,), (Message("assistant", "ello"),), max_length=1000)
    assert sample.token_ids[: sample.loss_mask.index(1)] == glued.prompt_ids((USER,))


def test_a_conversation_is_cut_on_the_right(chat):
    whole = conversation(chat, USER, ANSWER)
    cut = conversation(chat, USER, ANSWER, max_length=len(whole.token_ids) - 1)
    assert cut.token_ids == whole.token_ids[:-1]
    assert cut.loss_mask == whole.loss_mask[:-1]


def test_a_conversation_whose_answer_is_cut_away_is_none(chat):
    length = len(chat.prompt_ids((USER,)))
    assert chat.conversation((USER, ANSWER), max_length=length) is None
    assert chat.conversation((USER, ANSWER), max_length=length + 1) is not None
    assert chat.conversation((USER,), max_length=1000) is None


def test_running_text_is_trained_after_the_opening_of_an_answer(chat, chatml):
    for one in (chat, chatml):
        spans = trained_spans(one, conversation(one, ANSWER))
        assert [golden(one, span) for span in spans] == ["42<|end|>"]
    for opening in ("", "{{ '<|user|>' }}"):  # templates without a generation prompt
        plain = with_template(chat, opening + "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}")
        assert golden(plain, plain.transcript((ANSWER,), max_length=1000).token_ids).endswith("42<|end|>")
        spans = trained_spans(plain, plain.continuation((), (ANSWER,), max_length=1000))
        assert [golden(plain, span) for span in spans] == ["42<|end|>" if opening else "2<|end|>"]


def test_the_preview_marks_what_is_trained(chatml):
    text = chatml.preview(conversation(chatml, USER, ANSWER))
    assert text == "<|user|>\nWhat is 12 + 30?<|end|>\n<|assistant|>\n【42<|end|>】\n"


def test_decoding_leaves_special_tokens_out(chat):
    assert chat.decode(conversation(chat, USER, ANSWER).token_ids) == "What is 12 + 30?42"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        *((token, True) for token in ("<think>", "</think>", "[THINK]", "<tool_call>", "<|channel|>")),
        *((token, True) for token in ("<|python_tag|>", "<plan>", "[BEGIN_SOLUTION]")),
        *((token, True) for token in ("<｜tool▁calls▁begin｜>", "<|END_THINKING|>", "<file_sep>")),
        *((token, False) for token in ("<start_of_turn>", "<|system|>", "<|eom|>")),
    ],
)
def test_a_text_shows_the_special_tokens_that_are_an_answers_own(chat, token, shown):
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    names = ["<think>", "<|channel|>", "<start_of_turn>", "<|eom|>", token]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.chat_template = (  # it writes the channel of every answer
        "{% for m in messages %}{{ '<start_of_turn><|' + m['role'] + '|>' }}"
        "{{ '<|channel|>final' if m['role'] == 'assistant' else '' }}{{ m['content'] + eos_token }}{% endfor %}"
        "{{ '<start_of_turn><|assistant|><|channel|>final' if add_generation_prompt else '' }}"
    )
    number = tokenizer.convert_tokens_to_ids(token)
    own = ChatTemplate(tokenizer, ends=[tokenizer.convert_tokens_to_ids("<|eom|>")])
    ids = [number, *chat.tokenizer("12")["input_ids"], number, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert own.decode(ids) == (f"{token}12{token}" if shown else "12")
    if shown:  # what was shown is tokenized as it was sampled
        assert own.tokenizer(own.decode(ids), add_special_tokens=False)["input_ids"] == ids[:-2]


def test_a_template_that_rewrites_earlier_turns_is_refused(chat):
    forgetful = with_template(chat, FORGETFUL)
    sample = forgetful.continuation((USER, ANSWER, THANKS), (BYE,), max_length=1000)  # earlier turns are only read
    shown = "What is 12 + 30?<|end|>...<|end|>Thank you.<|end|>Hello Maria.<|end|>"
    assert golden(forgetful, sample.token_ids) == shown
    with pytest.raises(DataError, match=r"turn 2 of 4.*prepare_data.chat_template"):
        forgetful.conversation((USER, ANSWER, THANKS, BYE), max_length=1000)


def test_a_template_that_prints_the_date_gives_the_same_tokens_every_day(chat):
    dated = with_template(chat, "{{ strftime_now('%d %b %Y') + '\n' }}" + chat.tokenizer.chat_template)
    assert golden(dated, dated.prompt_ids((USER,))) == ("26 Jul 2024\n<|user|>What is 12 + 30?<|end|><|assistant|>")
    text = golden(dated, conversation(dated, USER, ANSWER).token_ids)
    assert text == "26 Jul 2024\n<|user|>What is 12 + 30?<|end|><|assistant|>42<|end|>"


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        (None, 'chat_template = "chatml"'),
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "contains no EOS token: sampling would not stop"),
    ],
)
def test_a_template_that_is_missing_or_ends_no_answer_is_refused(chat, source, rule):
    with pytest.raises(ConfigError, match=rule):
        with_template(chat, source)


def test_the_digest_changes_with_the_template_only(chat, chatml):
    again = ChatTemplate.load(Path(chat.tokenizer.name_or_path))
    assert again.digest == chat.digest != chatml.digest


def test_the_next_turn_is_what_follows_the_end_of_an_answer(chat, chatml):
    for template in (chat, chatml):
        whole = template.tokenizer(template.prompt_text((USER, ANSWER, THANKS)), add_special_tokens=False)["input_ids"]
        first = template.prompt_ids((USER,)) + tuple(template.tokenizer("42", add_special_tokens=False)["input_ids"])
        assert (*first, template.eos_id, *template.turn_ids((THANKS,))) == tuple(whole)
    assert golden(chatml, chatml.turn_ids((THANKS,))).startswith("\n")  # written after the answer's end, so not sampled


def test_the_next_turn_is_found_where_a_template_leaves_earlier_thoughts_out(chat):
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{{ '(thought)' if m.role == 'assistant' and loop.last and loop.length > 1 else '' }}"
        "{{ m.content + eos_token }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    template = with_template(chat, source)
    assert golden(template, template.turn_ids((THANKS,))) == golden(chat, chat.turn_ids((THANKS,)))


def test_a_template_that_changes_the_end_of_an_answer_has_no_next_turn(chat):
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}"
        "{{ 'fin' if loop.last and m.role == 'assistant' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    with pytest.raises(DataError, match="renders the end of an answer differently"):
        with_template(chat, source).turn_ids((THANKS,))


# ---------------------------------------------------------------- tool rendering


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


@pytest.fixture(scope="module")
def calling(chat: ChatTemplate) -> ChatTemplate:
    return with_template(chat, TOOL_TEMPLATE)


def test_only_what_the_assistant_says_and_calls_is_trained(calling):
    sample = conversation(calling, *TALK)
    eos = calling.tokenizer.eos_token
    assert [golden(calling, span) for span in trained_spans(calling, sample)] == [
        f'I add.<call>{{"name": "add", "arguments": {{"a": 12}}}}</call>{eos}',
        f'<call>{{"name": "add", "arguments": {{"a": 30}}}}</call>{eos}',
        f"It is 42.{eos}",
    ]
    whole = golden(calling, sample.token_ids)
    assert '"name": "add", "parameters": {}' in whole and "<result>43</result>" in whole
    assert sample.token_ids[: len(calling.prompt_ids(TALK[:1]))] == calling.prompt_ids(TALK[:1])
    # The last answer follows the results that the sampler would see.
    last = calling.continuation(TALK[:-1], TALK[-1:], max_length=4096)
    assert last is not None and last.token_ids[: last.loss_mask.index(1)] == calling.prompt_ids(TALK[:-1])


CALL_END = NO_END.replace("{{- '' if", "{{- '<|call|>\\n' if")


def test_a_call_may_end_with_another_declared_end_token(chat_folder):
    tokenizer = ChatTemplate.load(chat_folder).tokenizer
    tokenizer.add_tokens([AddedToken("<|call|>", special=True)])
    tokenizer.chat_template = CALL_END
    calling = ChatTemplate(tokenizer, ends=[tokenizer.convert_tokens_to_ids("<|call|>")])
    sample = conversation(calling, *TALK)
    assert [golden(calling, span) for span in trained_spans(calling, sample)] == [
        'I add.<call>{"name": "add", "arguments": {"a": 12}}</call><|call|>',
        '<call>{"name": "add", "arguments": {"a": 30}}</call><|call|>',
        f"It is 42.{tokenizer.eos_token}",
    ]
    with pytest.raises(ConfigError, match="the end of the turn of a tool call"):  # not declared
        ChatTemplate(tokenizer).conversation(TALK, max_length=4096)


GLM_ENDS = ("<|user|>", "<|observation|>")


def glm(folder: Path, template: str) -> ChatTemplate:
    """A tokenizer with the tokens of GLM-4.5 and `template`."""
    tokenizer = ChatTemplate.load(folder).tokenizer
    tokens = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", *GLM_ENDS)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, ends=[tokenizer.convert_tokens_to_ids(end) for end in GLM_ENDS])


def test_an_answer_and_a_call_of_glm_end_with_the_token_that_opens_the_next_turn(chat_folder):
    calling = glm(chat_folder, SHIPPED["glm_4_5"])
    sample = conversation(calling, *TALK)
    assert [golden(calling, span) for span in trained_spans(calling, sample)] == [
        "\n<think></think>\nI add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n</tool_call><|observation|>",
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>30</arg_value>\n</tool_call><|observation|>",
        "\n<think></think>\nIt is 42.<|user|>",
    ]
    for at, message in enumerate(TALK):
        if message.role == "assistant":
            prompt = calling.prompt_ids(TALK[:at])
            assert sample.token_ids[: len(prompt)] == prompt
    assert golden(calling, calling.turn_ids(TALK[2:3])) == "\n<tool_response>\n42\n</tool_response><|assistant|>"
    assert golden(calling, calling.turn_ids([THANKS])) == "\nThank you.<|assistant|>"


def test_the_own_template_of_glm_ends_no_answer_and_is_refused_with_the_name_of_one_that_does(chat_folder):
    own = SHIPPED["glm_4_5"].replace("{{ '<|observation|>' if message['tool_calls'] else '<|user|>' }}", "")
    with pytest.raises(ConfigError, match=r'contains no EOS token.*set prepare_data.chat_template = "glm_4_5"'):
        glm(chat_folder, own)


@pytest.mark.parametrize(
    ("text", "messages", "missing"),
    [
        (NO_CALLS, TALK, "the assistant's tool calls"),
        (NO_END, TALK, "the end of the turn of a tool call"),
        (NO_WORDS, TALK, "the assistant's words beside a tool call"),
        (CHATML_LIKE, TALK, "the tools, so conversations with tools cannot be trained on"),
        (CHATML_LIKE, (Message("user", "12 + 30?"), *TALK[1:]), "the assistant's tool calls"),
    ],
)
def test_a_template_that_leaves_a_part_of_a_conversation_with_tools_out_is_refused(chat, text, messages, missing):
    with pytest.raises(ConfigError, match=f"does not render {missing}.*prepare_data.chat_template"):
        with_template(chat, text).conversation(messages, max_length=4096)


def test_a_template_without_words_beside_calls_serves_rows_that_have_none(chat):
    wordless = with_template(chat, NO_WORDS)
    assert len(trained_spans(wordless, conversation(wordless, ASK, *TALK[4:]))) == 2


PARTS = (  # as multimodal models have it: a text is a sequence of characters, none of which has a type
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
STRICT = "{% for m in messages if m['content'] is string %}{{ raise_exception('parts, please') }}{% endfor %}" + PARTS
FIRST = PARTS.replace("{% for part in m['content'] %}", "{% for part in m['content'][:1] %}")
SAID = (Message("system", "Add."), Message("user", "12 + 30?"), Message("assistant", "42"))


@pytest.mark.parametrize("text", [PARTS, STRICT, FIRST])
def test_a_template_that_shows_only_parts_gets_them(chat, text):
    parts = with_template(chat, text)
    assert conversation(parts, *SAID) == conversation(chat, *SAID)
    assert parts.prompt_ids(SAID[:2]) == chat.prompt_ids(SAID[:2])
    assert parts.turn_ids(SAID[1:2]) == chat.turn_ids(SAID[1:2])


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("text", ["{{ m['content'] }}", "{{ m['content'][0]['text'] }}"])
def test_a_template_that_leaves_out_the_words_of_a_role_is_refused(chat, role, text):
    silent = (
        f"{{% for m in messages %}}{{{{ '<|' + m['role'] + '|>' }}}}{{% if m['role'] != '{role}' %}}{text}{{% endif %}}"
        "{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    with pytest.raises(ConfigError, match=f"does not render the words of the role {role}.*prepare_data.chat_template"):
        with_template(chat, silent).conversation(SAID, max_length=64)
    if role == "system":
        assert with_template(chat, silent).conversation(SAID[1:], max_length=64)


@pytest.mark.parametrize("shown", ["loop.first", "loop.last", "loop.index0 > 1"])
def test_a_template_that_leaves_out_one_of_several_questions_is_refused(chat, shown):
    words = f"(message.content if {shown} or message.role != 'user' or messages | length < 3 else '')"
    silent = with_template(chat, TOOL_TEMPLATE.replace("+ message.content }}", f"+ {words} }}}}"))
    assert silent.conversation(SAID[1:], max_length=64)
    with pytest.raises(ConfigError, match="does not render every question of a user"):
        silent.prompt_ids((*SAID[1:], SAID[1]))


def test_a_table_without_tool_calls_refuses_them():
    with pytest.raises(DataError, match="this table holds no tool calls; use them in demonstrations"):
        plain_messages(TALK)


# ---------------------------------------------------------------- answers


def test_an_answer_is_one_message_of_the_assistant_whoever_of_the_policy_s_versions_wrote_it():
    one = rollout("p", "text", 1.0, tokens=4)
    in_rounds = replace(one.completion, spans=(ActionSpan(0, 2, 0), ActionSpan(2, 4, 1)))
    for completion in (one.completion, in_rounds):
        assert answer_message(replace(one, completion=completion)) == Message("assistant", "text")


def test_an_episode_is_no_answer():
    one = rollout("p", "move, board, move", 1.0, tokens=4)
    episode = replace(one, completion=replace(one.completion, spans=(ActionSpan(0, 1, 0), ActionSpan(3, 4, 0))))
    with pytest.raises(DataError, match="rollouts = 'p': 2 of its 4 tokens come from an environment"):
        answer_message(episode)
