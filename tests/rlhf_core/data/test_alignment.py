"""Groups of tokens: every group spells the same text in both tokenizers, and no finer cut would."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from rlhf_core.data.alignment import AlignedSample, aligned_answer, aligned_examples, characters
from rlhf_core.data.chat import CHATML_LIKE, ChatTemplate
from rlhf_core.types import Message, TokenSample
from tests.rlhf_core.data.small_tokenizers import FORGETFUL, KINDS, LLAMA2, VICUNA, ZEPHYR, tokenizer_of, with_template

ASK, ANSWER = Message("user", "What is 12 + 30?"), Message("assistant", "It is 42, and thank you for writing!")
THANKS, BYE = Message("user", "Thank you."), Message("assistant", "Hello Maria: äöü, 日本語 and 🙂🙃 too.")
TURNS = (ASK, ANSWER, THANKS, BYE)


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> ChatTemplate:
    """A tokenizer of up to 1,000 tokens, trained on other texts, with ChatML's line breaks."""
    from rlhf_core.models.initialize import train_tokenizer  # imports transformers

    folder = tmp_path_factory.mktemp("large")
    texts = [
        "It is good and thankful. 日本 and 語 🙂",
        "writing, written, wrote: and thank you for it!",
        "Say hello: äöü",
    ]
    train_tokenizer(texts * 5, vocab_size=1000, folder=folder)
    tokenizer = ChatTemplate.load(folder).tokenizer
    tokenizer.chat_template = CHATML_LIKE
    return ChatTemplate(tokenizer)


def only(samples: list[AlignedSample]) -> AlignedSample:
    (sample,) = samples
    return sample


def written(chat: ChatTemplate, *ids: int) -> TokenSample:
    """Return the prompt `ASK` and an answer of these tokens."""
    prompt = chat.prompt_ids((ASK,))
    return TokenSample(prompt + ids, (0,) * len(prompt) + (1,) * len(ids))


def encoded(chat: ChatTemplate, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False))


def spans(sample: AlignedSample) -> list[tuple[int, int, int, int]]:
    """Return the groups of the only teacher: the student's tokens, and the teacher's."""
    (teacher,) = sample.teachers
    return [(one.start, one.end, one.teacher_start, one.teacher_end) for one in teacher.groups]


def said(student: ChatTemplate, teacher: ChatTemplate, sample: AlignedSample, number: int = 0) -> list[tuple[str, str]]:
    """Return the text of each group in the tokens of the student and of a teacher."""
    one = sample.teachers[number]
    own, theirs = (list(itertools.chain(*answers(made))) for made in (sample, one.sample))
    return [
        (text(student, own[group.start : group.end]), text(teacher, theirs[group.teacher_start : group.teacher_end]))
        for group in one.groups
    ]


def answers(sample: TokenSample | AlignedSample) -> list[list[int]]:
    """Return the masked tokens of each answer."""
    found: list[list[int]] = []
    for before, token, masked in zip((0, *sample.loss_mask), sample.token_ids, sample.loss_mask):
        found += [[]] if masked and not before else []
        if masked:
            found[-1].append(token)
    return found


def text(chat: ChatTemplate, ids: Any) -> str:
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False))


def slow_ends(chat: ChatTemplate, ids: list[int]) -> dict[int, int]:
    """Return number of characters -> number of tokens with them, by decoding every beginning of the answer from its start."""
    whole = text(chat, ids)
    beginnings = {number: text(chat, ids[:number]) for number in range(1, len(ids) + 1)}
    return {len(one): number for number, one in beginnings.items() if whole.startswith(one) and one}


def slow_groups(chats: tuple[ChatTemplate, ChatTemplate], sides: tuple[list[int], list[int]]) -> list[tuple[int, ...]]:
    """Return the groups of one answer that both tokenizers end with a token of their own."""
    ours, theirs = (slow_ends(chat, ids[:-1]) for chat, ids in zip(chats, sides, strict=True))
    ends = [(0, 0), *((ours[at], theirs[at]) for at in sorted(ours.keys() & theirs.keys()))]
    ends.append((len(sides[0]), len(sides[1])))  # the end-of-turn tokens
    return [(a, b, c, d) for (a, c), (b, d) in itertools.pairwise(ends)]


def test_groups_are_the_finest_that_both_tokenizers_have_in_common(chat, large):
    for chats in ((chat, large), (large, chat)):
        sample = only(aligned_examples(chats[0], [chats[1]], TURNS, max_length=1000))
        (teacher,) = sample.teachers
        expected, first, teacher_first = [], 0, 0
        for ours, theirs in zip(answers(sample), answers(teacher.sample), strict=True):
            expected += [
                (first + a, first + b, teacher_first + c, teacher_first + d)
                for a, b, c, d in slow_groups(chats, (ours, theirs))
            ]
            first, teacher_first = first + len(ours), teacher_first + len(theirs)
        found = spans(sample)
        assert found == expected
        # both kinds of groups occur, and all masked tokens are in one
        assert {(b - a, d - c) for a, b, c, d in found} >= {(1, 1)}
        assert any(b - a > 1 for a, b, _, _ in found) and any(d - c > 1 for _, _, c, d in found)
        assert sum(b - a for a, b, _, _ in found) == sum(sample.loss_mask)


def test_the_same_tokenizer_has_a_group_for_each_token_that_ends_a_character(chat):
    sample = only(aligned_examples(chat, [chat], (ASK, ANSWER), max_length=1000))
    assert spans(sample) == [(at, at + 1, at, at + 1) for at in range(sum(sample.loss_mask))]


def test_only_answers_are_aligned_and_the_ends_of_turns_with_each_other(chat, large):
    sample = only(aligned_examples(chat, [large, chat], TURNS, max_length=1000))
    for number, template in enumerate((large, chat)):
        found = said(chat, template, sample, number)
        assert all(ours == other for ours, other in found)
        assert [ours for ours, _ in found].count("<|end|>") == 2
        assert "".join(ours for ours, _ in found) == f"{ANSWER.content}<|end|>{BYE.content}<|end|>"


@pytest.mark.parametrize("template", [LLAMA2, ZEPHYR, VICUNA], ids=["llama2", "zephyr", "vicuna"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizers_that_mark_beginnings_are_aligned_too(chat, kind, template):
    """Llama 2 writes a space before and after an answer, the others may; it belongs to the first and the last group."""
    other = ChatTemplate(tokenizer_of(kind, template))
    for student, teacher in ((chat, other), (other, chat)):
        sample = only(aligned_examples(student, [teacher], TURNS, max_length=1000))
        groups = sample.teachers[0].groups
        assert sum(one.end - one.start for one in groups) == sum(sample.loss_mask)
        assert groups[-1].teacher_end == sum(sample.teachers[0].sample.loss_mask)
        own = [token for answer in answers(sample) for token in answer]
        theirs = [token for answer in answers(sample.teachers[0].sample) for token in answer]
        for at, one in enumerate(groups):
            # Every beginning up to a group's end is the same text but for spaces at the edges of answers.
            both = [text(student, own[: one.end]), text(teacher, theirs[: one.teacher_end])]
            assert len({x.replace("</s>", "<|end|>").replace(" ", "") for x in both}) == 1, (at, both)
        assert len(groups) > 30


def test_a_cut_answer_has_no_group_at_its_end_and_none_beyond(chat, large):
    whole = only(aligned_examples(chat, [large], (ASK, ANSWER), max_length=1000)).teachers[0].groups
    length = len(chat.prompt_ids((ASK,))) + 12
    sample = only(aligned_examples(chat, [large], (ASK, ANSWER), max_length=length))
    assert sum(sample.loss_mask) == 12
    cut = sample.teachers[0].groups
    assert cut == whole[: len(cut)]
    theirs = sum(sample.teachers[0].sample.loss_mask)  # cut too, after the same number of tokens with its prompt
    assert [one for one in whole if one.end < 12 and one.teacher_end < theirs] == list(cut)
    assert whole[-1].end > 12 and theirs < whole[-1].teacher_end and len(cut) > 2


def test_an_answer_of_the_students_own_is_the_same_text_for_the_teacher(chat, large):
    cut = encoded(chat, "Hel") + encoded(chat, "lo to ")  # not how the tokenizer would cut it
    for ids, ended in ((cut, False), ((*cut, chat.eos_id), True)):
        own = written(chat, *ids)
        sample = aligned_answer(chat, [large], (ASK,), own)
        assert (sample.token_ids, sample.loss_mask) == (own.token_ids, own.loss_mask)
        (teacher,) = sample.teachers
        assert text(large, answers(teacher.sample)[0]) == "Hello to <|end|>"
        assert teacher.sample.token_ids[: len(large.prompt_ids((ASK,)))] == large.prompt_ids((ASK,))
        assert (teacher.groups[-1].end == len(ids)) == ended
    assert aligned_answer(chat, [large], (ASK,), written(chat)) is None


def test_every_declared_end_of_the_student_is_the_end_of_its_answer(large):
    tokenizer = tokenizer_of("bpe-first", ZEPHYR)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|stop|>"]})
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    student = ChatTemplate(tokenizer, ends=[stop])
    assert student.eos_id != stop
    for end in (student.eos_id, stop):
        ids = (*encoded(student, "It is 42."), end)
        sample = aligned_answer(student, [large], (ASK,), written(student, *ids))
        theirs = sample.teachers[0].sample
        assert text(large, answers(theirs)[0]) == "It is 42.<|end|>"
        count = sum(theirs.loss_mask)
        assert spans(sample)[-1] == (len(ids) - 1, len(ids), count - 1, count)


def test_bytes_that_are_no_text_are_one_group_up_to_the_next_character(chat, large):
    start, broken = encoded(chat, "It"), encoded(chat, "🙂")
    ids = (*start, *broken[:1], *start, chat.eos_id)
    sample = aligned_answer(chat, [large], (ASK,), written(chat, *ids))
    groups = sample.teachers[0].groups
    assert text(large, answers(sample.teachers[0].sample)[0]) == "It\N{REPLACEMENT CHARACTER}It<|end|>"
    assert groups[-1].end == len(ids) and len(groups) >= 3


def test_an_answer_that_ends_at_once_has_the_end_of_turn_in_common(chat, large):
    sample = aligned_answer(chat, [large], (ASK,), written(chat, chat.eos_id))
    assert sample is not None and spans(sample) == [(0, 1, 0, 1)]


def test_beyond_the_first_character_that_differs_nothing_is_aligned(chat):
    loud = chat.tokenizer.chat_template.replace("message['content']", "message['content'] | replace('for', 'FOR')")
    sample = only(aligned_examples(chat, [with_template(chat, loud)], (ASK, ANSWER), max_length=1000))
    aligned = text(chat, answers(sample)[0][: spans(sample)[-1][1]])
    assert ANSWER.content.partition("for")[0].startswith(aligned) and len(aligned) > 10


def test_a_template_that_rewrites_earlier_turns_makes_a_sample_of_each_answer(chat):
    samples = aligned_examples(chat, [with_template(chat, FORGETFUL)], TURNS, max_length=1000)
    assert [text(chat, answers(one)[0]) for one in samples] == [f"{ANSWER.content}<|end|>", f"{BYE.content}<|end|>"]
    assert all(sum(one.loss_mask) == one.teachers[0].groups[-1].end for one in samples)


CALLS = ZEPHYR.replace(
    "m['content'] + eos_token", "m['content'] + ('<call>' if m['content'].startswith('CALL') else eos_token)"
)
"""Ends tool calls with other text than the end-of-turn token, so that they are not trained."""


@pytest.mark.parametrize("template", [CALLS, ZEPHYR, LLAMA2], ids=["no end", "apart", "merged"])
@pytest.mark.parametrize("swapped", [False, True])
def test_an_answer_without_a_mask_and_answers_without_a_border_move_no_other_answer(template, swapped):
    """Answers were paired by their order: the second of one tokenizer with the third of the other."""
    chats = [ChatTemplate(tokenizer_of("bpe-first", one)) for one in (ZEPHYR, template)]
    student, teacher = reversed(chats) if swapped else chats
    texts = ["CALL: 12 + 30", "It is 42.", "I am sorry.", "Thank you."]
    call, *others = (Message("assistant", one) for one in texts)
    turns = [Message("user", "a"), call, Message("user", "b"), *others[:2], Message("user", "c"), others[2]]
    found: list[str] = []
    for sample in aligned_examples(student, [teacher], turns, max_length=1000):
        pairs = said(student, teacher, sample)
        assert all(ours.strip() == other.strip() for ours, other in pairs)
        assert sum(end - start for start, end, *_ in spans(sample)) == sum(sample.loss_mask)
        found.append("".join(ours for ours, _ in pairs))
    whole = "".join(found).replace(" ", "")
    expected = texts[1:] if template == CALLS else texts
    assert whole == "".join(f"{one}</s>" for one in expected).replace(" ", "")


def test_a_conversation_without_a_trained_token_in_one_of_the_models_is_left_out(chat, large):
    shortest, longest = sorted((chat, large), key=lambda one: len(one.prompt_ids((ASK,))))
    short, long = (len(one.prompt_ids((ASK,))) for one in (shortest, longest))
    assert short < long
    assert only(aligned_examples(shortest, [longest], (ASK, ANSWER), max_length=long + 1)).loss_mask[long]
    for student, teacher in ((shortest, longest), (longest, shortest)):
        for length in (long, short):  # one of them cut before its answer, both cut
            assert aligned_examples(student, [teacher], (ASK, ANSWER), max_length=length) == []


def test_the_characters_of_a_decoder_that_does_not_add_up_are_only_known_at_the_end(chat):
    class Odd:
        """Writes as many dots before the text as the square of the number of tokens."""

        def decode(self, ids: list[int], **options: Any) -> str:
            return "." * len(ids) ** 2 + str(chat.tokenizer.decode(ids))

    ids = encoded(chat, "It is 42")
    whole, ends = characters(Odd(), ids)
    assert ends[-1] == len(whole) and set(ends[:-1]) == {None}
    assert characters(chat.tokenizer, ()) == ("", ())


def test_masks_decide_what_is_an_answer(chat, large):
    sample = only(aligned_examples(chat, [large], TURNS, max_length=1000))
    alone = only(aligned_examples(chat, [large], TURNS[:2], max_length=1000))
    assert sample.teachers[0].groups[: len(alone.teachers[0].groups)] == alone.teachers[0].groups
    assert replace(sample, teachers=()) != replace(alone, teachers=())
