"""Rendering and masks: what is trained is each answer with its end-of-turn token, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import Message, TokenSample

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


def test_the_rendered_conversation_is_golden(chat: ChatTemplate) -> None:
    sample = conversation(chat, USER, ANSWER)
    assert golden(chat, sample.token_ids) == "<|user|>What is 12 + 30?<|end|><|assistant|>42<|end|>"


def test_the_rendered_chatml_conversation_is_golden(chatml: ChatTemplate) -> None:
    sample = conversation(chatml, USER, ANSWER)
    assert golden(chatml, sample.token_ids) == "<|user|>\nWhat is 12 + 30?<|end|>\n<|assistant|>\n42<|end|>\n"


def test_every_answer_is_trained_with_its_end_of_turn_token(chat: ChatTemplate) -> None:
    spans = trained_spans(chat, conversation(chat, USER, ANSWER, THANKS, BYE))
    assert [golden(chat, span) for span in spans] == ["42<|end|>", "Hello Maria.<|end|>"]
    assert [span[-1] for span in spans] == [chat.eos_id, chat.eos_id]


def test_what_a_template_writes_after_the_end_of_turn_is_not_trained(chatml: ChatTemplate) -> None:
    spans = trained_spans(chatml, conversation(chatml, USER, ANSWER, THANKS, BYE))
    assert [golden(chatml, span) for span in spans] == ["42<|end|>", "Hello Maria.<|end|>"]


def test_a_transcript_has_the_tokens_of_the_conversation_and_trains_all_but_the_first(chatml: ChatTemplate) -> None:
    whole = conversation(chatml, USER, ANSWER, THANKS, BYE)
    sample = chatml.transcript([USER, ANSWER, THANKS, BYE], max_length=1000)
    assert sample == TokenSample(whole.token_ids, (0,) + (1,) * (len(whole.token_ids) - 1))
    assert chatml.transcript([USER], max_length=5) == TokenSample(whole.token_ids[:5], (0, 1, 1, 1, 1))
    assert chatml.transcript([USER], max_length=1) is None


def test_a_continuation_trains_the_answer_only(chatml: ChatTemplate) -> None:
    sample = chatml.continuation((USER, ANSWER, THANKS), (BYE,), max_length=1000)
    assert sample is not None
    assert [golden(chatml, span) for span in trained_spans(chatml, sample)] == ["Hello Maria.<|end|>"]


def test_a_continuation_begins_with_exactly_the_prompt_that_the_sampler_is_given(chatml: ChatTemplate) -> None:
    for prompt in ((USER,), (USER, ANSWER, THANKS)):
        prompt_ids = chatml.prompt_ids(prompt)
        sample = chatml.continuation(prompt, (BYE,), max_length=1000)
        assert sample is not None
        assert sample.token_ids[: len(prompt_ids)] == prompt_ids
        assert sample.loss_mask.index(1) == len(prompt_ids)


def test_the_prompt_ends_with_the_generation_prompt(chat: ChatTemplate) -> None:
    assert golden(chat, chat.prompt_ids((USER,))).endswith("<|end|><|assistant|>")


def test_the_prompt_is_not_merged_with_the_first_token_of_the_answer(chat: ChatTemplate) -> None:
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ 'H' + m['content'] + eos_token }}"
        "{% else %}{{ m['content'] + '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'H' }}{% endif %}"
    )
    glued = ChatTemplate(tokenizer)
    assert len(tokenizer("Hello", add_special_tokens=False)["input_ids"]) == 1  # H and ello would merge
    sample = glued.continuation((USER,), (Message("assistant", "ello"),), max_length=1000)
    assert sample is not None
    assert sample.token_ids[: sample.loss_mask.index(1)] == glued.prompt_ids((USER,))


def test_a_conversation_is_cut_on_the_right(chat: ChatTemplate) -> None:
    whole = conversation(chat, USER, ANSWER)
    cut = conversation(chat, USER, ANSWER, max_length=len(whole.token_ids) - 1)
    assert cut.token_ids == whole.token_ids[:-1]
    assert cut.loss_mask == whole.loss_mask[:-1]


def test_a_conversation_whose_answer_is_cut_away_is_none(chat: ChatTemplate) -> None:
    length = len(chat.prompt_ids((USER,)))
    assert chat.conversation((USER, ANSWER), max_length=length) is None
    assert chat.conversation((USER, ANSWER), max_length=length + 1) is not None
    assert chat.conversation((USER,), max_length=1000) is None


def test_running_text_is_trained_after_the_opening_of_an_answer(chat: ChatTemplate, chatml: ChatTemplate) -> None:
    for one in (chat, chatml):
        spans = trained_spans(one, conversation(one, ANSWER))
        assert [golden(one, span) for span in spans] == ["42<|end|>"]


def test_the_preview_marks_what_is_trained(chatml: ChatTemplate) -> None:
    text = chatml.preview(conversation(chatml, USER, ANSWER))
    assert text == "<|user|>\nWhat is 12 + 30?<|end|>\n<|assistant|>\n【42<|end|>】\n"


def test_decoding_leaves_special_tokens_out(chat: ChatTemplate) -> None:
    assert chat.decode(conversation(chat, USER, ANSWER).token_ids) == "What is 12 + 30?42"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        *(
            (token, True)
            for token in (
                "<think>",
                "</think>",
                "[THINK]",
                "<tool_call>",
                "<|channel|>",
                "<|python_tag|>",
                "<plan>",
                "[BEGIN_SOLUTION]",
            )
        ),
        *((token, True) for token in ("<｜tool▁calls▁begin｜>", "<|END_THINKING|>", "<file_sep>")),
        *((token, False) for token in ("<start_of_turn>", "<|system|>", "<|eom|>")),
    ],
)
def test_a_text_shows_the_special_tokens_that_are_an_answers_own(chat: ChatTemplate, token: str, shown: bool) -> None:
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


def test_a_template_that_rewrites_earlier_turns_is_refused(chat: ChatTemplate) -> None:
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '...' if m['role'] == 'assistant' and not loop.last else m['content'] }}"
        "{{ eos_token }}{% endfor %}"
    )
    forgetful = ChatTemplate(tokenizer)
    sample = forgetful.continuation((USER, ANSWER, THANKS), (BYE,), max_length=1000)  # earlier turns are only read
    assert sample is not None
    assert (
        golden(forgetful, sample.token_ids) == "What is 12 + 30?<|end|>...<|end|>Thank you.<|end|>Hello Maria.<|end|>"
    )
    with pytest.raises(DataError, match=r"turn 2 of 4.*prepare_data.chat_template"):
        forgetful.conversation((USER, ANSWER, THANKS, BYE), max_length=1000)


def test_a_template_that_prints_the_date_gives_the_same_tokens_every_day(chat: ChatTemplate) -> None:
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') + '\n' }}" + tokenizer.chat_template
    dated = ChatTemplate(tokenizer)
    assert golden(dated, dated.prompt_ids((USER,))) == ("26 Jul 2024\n<|user|>What is 12 + 30?<|end|><|assistant|>")
    text = golden(dated, conversation(dated, USER, ANSWER).token_ids)
    assert text == "26 Jul 2024\n<|user|>What is 12 + 30?<|end|><|assistant|>42<|end|>"


def test_a_tokenizer_without_a_template_is_refused_with_a_remedy(chat: ChatTemplate) -> None:
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match='chat_template = "chatml"'):
        ChatTemplate(tokenizer)


def test_a_template_whose_answers_do_not_end_with_eos_is_refused(chat: ChatTemplate) -> None:
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="contains no EOS token: sampling would not stop"):
        ChatTemplate(tokenizer)


def test_the_digest_changes_with_the_template_only(chat: ChatTemplate, chatml: ChatTemplate) -> None:
    again = ChatTemplate.load(Path(chat.tokenizer.name_or_path))
    assert again.digest == chat.digest != chatml.digest


def test_the_next_turn_is_what_follows_the_end_of_an_answer(chat: ChatTemplate, chatml: ChatTemplate) -> None:
    for template in (chat, chatml):
        whole = template.tokenizer(template.prompt_text((USER, ANSWER, THANKS)), add_special_tokens=False)["input_ids"]
        first = template.prompt_ids((USER,)) + tuple(template.tokenizer("42", add_special_tokens=False)["input_ids"])
        assert (*first, template.eos_id, *template.turn_ids((THANKS,))) == tuple(whole)
    assert golden(chatml, chatml.turn_ids((THANKS,))).startswith("\n")  # written after the answer's end, so not sampled


def test_the_next_turn_is_found_where_a_template_leaves_earlier_thoughts_out(chat: ChatTemplate) -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}"
        "{{ '(thought)' if m.role == 'assistant' and loop.last and loop.length > 1 else '' }}"
        "{{ m.content + eos_token }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    template = with_template(chat, source)
    assert golden(template, template.turn_ids((THANKS,))) == golden(chat, chat.turn_ids((THANKS,)))


def test_a_template_that_changes_the_end_of_an_answer_has_no_next_turn(chat: ChatTemplate) -> None:
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}"
        "{{ 'fin' if loop.last and m.role == 'assistant' }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
    )
    with pytest.raises(DataError, match="renders the end of an answer differently"):
        with_template(chat, source).turn_ids((THANKS,))


def with_template(chat: ChatTemplate, source: str) -> ChatTemplate:
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)
