"""Pieces of a text have the tokens that the whole text has there, also where a tokenizer marks the beginning of a text.

The reference is the rendered conversation, tokenized whole: what the policy is given when it samples.
"""

from typing import Any

import pytest
from tokenizers import AddedToken

from rlhf_core.data.chat import ChatTemplate
from rlhf_core.data.tables import StepSplitter
from rlhf_core.types import Message, TokenSample
from tests.rlhf_core.data.small_tokenizers import KINDS, LLAMA2, VICUNA, ZEPHYR, tokenizer_of

USER, ANSWER = Message("user", "What is 12 + 30?"), Message("assistant", "Hello, 42 is ä.")
THANKS, BYE = Message("user", "Thank you."), Message("assistant", "Hello Maria.\n12")
WHOLE = (USER, ANSWER, THANKS, BYE)
TEMPLATES = {"llama2": LLAMA2, "zephyr": ZEPHYR}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return str(request.param)


@pytest.fixture(params=sorted(TEMPLATES))
def chat(kind: str, request) -> ChatTemplate:
    return ChatTemplate(tokenizer_of(kind, TEMPLATES[request.param]))


def ids(chat: ChatTemplate, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer(text, add_special_tokens=False)["input_ids"])


def rendered(chat: ChatTemplate, messages: tuple[Message, ...]) -> str:
    rows = [{"role": message.role, "content": message.content} for message in messages]
    return str(chat.tokenizer.apply_chat_template(rows, tokenize=False))


def spelt(chat: ChatTemplate, tokens: Any) -> str:
    return str(chat.tokenizer.decode(list(tokens), skip_special_tokens=False))


def made(sample: TokenSample | None) -> TokenSample:
    assert sample is not None
    return sample


def test_a_conversation_has_the_tokens_of_the_whole_text(chat):
    whole = ids(chat, rendered(chat, WHOLE))
    assert made(chat.conversation(WHOLE, max_length=1000)).token_ids == whole
    assert made(chat.transcript(WHOLE, max_length=1000)).token_ids == whole
    assert made(chat.continuation(WHOLE[:3], WHOLE[3:], max_length=1000)).token_ids == whole
    for length in (1, 3):
        assert chat.prompt_ids(WHOLE[:length]) == ids(chat, chat.prompt_text(WHOLE[:length]))


def test_the_answers_are_trained_up_to_their_end_of_turn(chat):
    sample = made(chat.conversation(WHOLE, max_length=1000))
    trained = [token for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    space = " " if chat.tokenizer.chat_template == LLAMA2 else ""
    text = f"{ANSWER.content}{space}</s>{space}{BYE.content}{space}</s>"
    assert spelt(chat, trained).strip() == text  # the decoder drops the space of the first token
    assert trained.count(chat.eos_id) == 2 and trained[-1] == chat.eos_id


def test_an_episode_has_the_tokens_of_the_whole_text(chat):
    prompt = chat.prompt_ids((USER,))
    said = made(chat.continuation((USER,), (ANSWER,), max_length=1000)).token_ids[len(prompt) :]
    sampled = said[: said.index(chat.eos_id) + 1]
    assert prompt + sampled + chat.turn_ids((THANKS,)) == ids(chat, chat.prompt_text(WHOLE[:3]))


def test_a_query_to_a_reward_service_has_the_tokens_of_training(chat):
    sample = made(chat.continuation((USER,), (ANSWER,), max_length=1000))
    end = len(sample.loss_mask) - sample.loss_mask[::-1].index(1)
    assert chat.answered_ids(USER.content, ANSWER.content) == sample.token_ids[:end]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Any:
    from transformers import AutoTokenizer

    from rlhf_core.models.initialize import train_tokenizer

    folder = tmp_path_factory.mktemp("byte_level")
    texts = ["USER: What is 12 + 30? ASSISTANT: Hello, Thank you. Hello Maria."] * 5
    train_tokenizer(texts, vocab_size=400, folder=folder)

    def with_template(template: str) -> ChatTemplate:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template, tokenizer.bos_token = template, tokenizer.eos_token  # Llama 2's template writes one
        return ChatTemplate(tokenizer)

    return with_template


@pytest.mark.parametrize("kind", ["byte-level", *KINDS])
def test_each_answer_follows_the_tokens_that_the_sampler_is_given(kind, byte_level):
    for template in (VICUNA, *TEMPLATES.values()):
        chat = byte_level(template) if kind == "byte-level" else ChatTemplate(tokenizer_of(kind, template))
        whole = (*WHOLE, Message("user", "Hello"), Message("assistant", "Hello"))
        sample = made(chat.conversation(whole, max_length=1000))
        assert spelt(chat, sample.token_ids) == spelt(chat, ids(chat, rendered(chat, whole)))
        for length in (1, 3, 5):
            prompt = chat.prompt_ids(whole[:length])
            assert sample.token_ids[: len(prompt)] == prompt
            assert spelt(chat, prompt) == spelt(chat, ids(chat, chat.prompt_text(whole[:length])))
            assert sample.loss_mask[len(prompt) - 1 : len(prompt) + 1] == (0, 1)
            continued = made(chat.continuation(whole[:length], whole[length:], max_length=1000))
            assert continued.token_ids == sample.token_ids
            assert continued.loss_mask == (0,) * len(prompt) + sample.loss_mask[len(prompt) :]
        if template == VICUNA:  # " Hello" reaches across in the whole text, also at the earlier answers
            assert prompt != ids(chat, chat.prompt_text(whole[:length]))
            first = chat.prompt_ids((USER,))
            assert first == ids(chat, chat.prompt_text((USER,))) != ids(chat, rendered(chat, whole))[: len(first)]


def test_a_prompt_whose_earlier_answers_the_template_rewrites_is_one_text(byte_level):
    source = (
        "{% for m in messages %}{{ m['role'] + ': ' + ('<think></think>' if m['role'] == 'assistant' and loop.last else '')"
        " + m['content'] + eos_token }}{% endfor %}{{ 'assistant: ' if add_generation_prompt }}"
    )
    chat = byte_level(source)
    prompt = chat.prompt_ids(WHOLE[:3])
    assert prompt == ids(chat, chat.prompt_text(WHOLE[:3]))
    assert made(chat.continuation(WHOLE[:3], WHOLE[3:], max_length=1000)).token_ids[: len(prompt)] == prompt


def test_a_prompt_whose_beginnings_the_template_refuses_is_one_text(byte_level):
    source = (
        "{% if messages|length < 3 and messages|length > 1 and messages[0]['content'] != 'Hi' %}"
        "{{ raise_exception('a question comes last') }}{% endif %}" + VICUNA
    )
    chat = byte_level(source)
    assert chat.prompt_ids(WHOLE[:3]) == ids(chat, chat.prompt_text(WHOLE[:3]))


def test_text_that_follows_sampled_tokens_gains_no_mark(kind):
    chat = ChatTemplate(tokenizer_of(kind, ZEPHYR))
    first = ids(chat, "Hello")
    for text in ("Maria", " Maria", "\nMaria", ", how are you?"):
        both = first + chat.following_ids(text, after=first[-1])
        assert spelt(chat, both) == f"Hello{text}"
    assert chat.following_ids("\nHello", after=chat.eos_id) == ids(chat, "</s>\nHello")[1:]


@pytest.mark.parametrize("special", [True, False])
def test_text_follows_an_added_token_without_a_name_as_in_the_whole_text(kind, special):
    tokenizer = tokenizer_of(kind, ZEPHYR)
    tokenizer.add_tokens([AddedToken("<|end|>", special=special, normalized=False)])  # as Phi-3's end of a turn
    chat, end = ChatTemplate(tokenizer), tokenizer.convert_tokens_to_ids("<|end|>")
    for text in ("Hello", "\nHello", " Hello"):
        whole = ids(chat, f"Hello<|end|>{text}")
        assert chat.following_ids(text, after=end) == whole[whole.index(end) + 1 :]


def test_steps_are_found_by_what_they_are_separated_with(kind):
    chat = ChatTemplate(tokenizer_of(kind, ZEPHYR))
    answer = ids(chat, "12 + 30\nHello Maria\n42")
    ends = StepSplitter(chat, "\n").ends(answer)
    texts = ["12 + 30\n", "12 + 30\nHello Maria\n", "12 + 30\nHello Maria\n42"]
    assert [spelt(chat, answer[: end + 1]) for end in ends] == texts
    # A separator with a space in it, and one that only stands there if spaces are dropped.
    assert len(StepSplitter(chat, " M").ends(ids(chat, "Hello Maria"))) == 2
    assert len(StepSplitter(chat, "oM").ends(ids(chat, "Hello Maria"))) == 1
