"""Align the tokens of a conversation between two tokenizers, each with its own chat template.

Only answers are aligned: the masked tokens of each assistant turn, in order. Both tokenizers see the same text there,
so the places where a token ends are the same characters. Where both have an end, a group closes: the fewest tokens of
each that spell the same text. The end-of-turn tokens form a separate group. Templates may add or drop white space at
the edges of an answer; it belongs to the first and the last group.

Nothing is aligned beyond the first character that differs (a normalizing tokenizer, a template that rewrites an
answer), nor at the end of an answer that was cut: there a model may have meant a longer token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from rlhf_core.data.chat import UNLIMITED, ChatTemplate, RewrittenTurns
from rlhf_core.data.chat_templates import common_beginning
from rlhf_core.types import Column, Message, TokenSample

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """A group of tokens that spell the same text: [start, end) of a student's sample and of a teacher's sample.

    >>> TokenGroup(start=0, end=2, teacher_start=0, teacher_end=1)  # two tokens of the student are one of the teacher
    TokenGroup(start=0, end=2, teacher_start=0, teacher_end=1)
    """

    start: int
    end: int
    teacher_start: int
    teacher_end: int


@dataclass(frozen=True, slots=True)
class AlignedTeacher:
    """A conversation in the tokens of a teacher, and the groups of tokens that it has in common with the student."""

    sample: TokenSample
    groups: tuple[TokenGroup, ...]

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.groups)


@dataclass(frozen=True, slots=True)
class AlignedSample:
    """A conversation in the tokens of a student, and the same one in the tokens of each teacher."""

    token_ids: Column[int]
    loss_mask: Column[int]
    teachers: tuple[AlignedTeacher, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherOutcomes:
    """Log-probs of a teacher with another tokenizer at the G groups of a sample (`rlhf_core.algorithms.distillation`)."""

    spans: tuple[tuple[int, int], ...]
    """The student's masked tokens [start, end) of each group."""
    text_logprobs: NDArray[np.float32]
    """Log-probability [G] of each group's text."""
    others: NDArray[np.float32]
    """Probabilities [G, N] of other outcomes than the text, in decreasing order."""

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.spans)


@dataclass(frozen=True, slots=True, eq=False)
class CrossTokenizerSample:
    """A sequence for distillation with the outcomes of each teacher, whose tokenizers differ from the student's."""

    token_ids: Column[int]
    loss_mask: Column[int]
    teachers: tuple[TeacherOutcomes, ...]


# ---------------------------------------------------------------- conversations


def aligned_examples(
    student: ChatTemplate, teachers: Sequence[ChatTemplate], messages: Sequence[Message], *, max_length: int
) -> list[AlignedSample]:
    """Align a conversation as samples that train each assistant turn once, cut to `max_length` tokens of each model.

    Usually this is one sample. If a template rewrites earlier turns or masks fewer answers than the conversation has
    (because it ends one without the end-of-turn token, or writes nothing between two), it is one sample for each
    assistant turn. Samples without a trained token in one of the models are left out.
    """
    chats = (student, *teachers)
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    try:
        whole = [chat.conversation(messages, max_length=UNLIMITED) for chat in chats]
        apart = any(sample is None or len(_runs(sample)) != len(turns) for sample in whole)
    except RewrittenTurns:
        apart = True
    if apart:
        rows = [
            [chat.continuation(messages[:at], messages[at : at + 1], max_length=max_length) for chat in chats]
            for at in turns
        ]
    else:
        rows = [[_cut(sample, max_length) for sample in whole if sample is not None]]
    found = [[sample for sample in row if sample is not None] for row in rows]
    return [aligned(student, teachers, row[0], row[1:]) for row in found if len(row) == len(chats)]


def aligned_answer(
    student: ChatTemplate, teachers: Sequence[ChatTemplate], messages: Sequence[Message], own: TokenSample
) -> AlignedSample | None:
    """Align `own`, a prompt of `messages` and the student's answer to it, with the same text in each teacher's tokens.

    The result is None if no token is trained, in `own` or after a teacher's template. Teachers see special tokens that
    the student wrote as plain text.
    """
    if not any(own.loss_mask):
        return None
    ((_, answer),) = _runs(own)
    text = _decode(student.tokenizer, answer[:-1] if answer[-1] in student.ends else answer)
    said = (Message("assistant", text),)
    theirs = [chat.continuation(messages, said, max_length=UNLIMITED) for chat in teachers]
    found = [sample for sample in theirs if sample is not None]
    return aligned(student, teachers, own, found) if len(found) == len(teachers) else None


def aligned(
    student: ChatTemplate, teachers: Sequence[ChatTemplate], own: TokenSample, theirs: Sequence[TokenSample]
) -> AlignedSample:
    """The student's sample `own` aligned with `theirs`, the same conversation in the tokens of each teacher."""
    made = [AlignedTeacher(one, groups(student, chat, own, one)) for chat, one in zip(teachers, theirs, strict=True)]
    return AlignedSample(own.token_ids, own.loss_mask, tuple(made))


# ---------------------------------------------------------------- tokens


def groups(
    student: ChatTemplate, teacher: ChatTemplate, own: TokenSample, theirs: TokenSample
) -> tuple[TokenGroup, ...]:
    """Find the groups of masked tokens that spell the same text in both samples of a conversation."""
    made: list[TokenGroup] = []
    for (first, ours), (teacher_first, others) in zip(_runs(own), _runs(theirs), strict=False):
        common = _common_ends(_Answer.of(student, ours), _Answer.of(teacher, others))
        for (start, teacher_start), (end, teacher_end) in pairwise([(0, 0), *common]):
            places = first + start, first + end, teacher_first + teacher_start, teacher_first + teacher_end
            made.append(TokenGroup(*places))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer's tokens: its text, the number of its characters before each token's end, and whether its turn ends.

    `ends[i]` is None where token i ends inside a character.
    """

    text: str
    ends: tuple[int | None, ...]
    ended: bool

    @classmethod
    def of(cls, chat: ChatTemplate, ids: Sequence[int]) -> _Answer:
        ended = ids[-1] in chat.ends
        text, ends = characters(chat.tokenizer, ids[:-1] if ended else ids)
        return cls(text, ends, ended)

    def places(self, *, start: int, end: int) -> dict[int, int]:
        """Map each character position to the number of tokens that end there or before.

        Positions are counted from `start`, up to `end`. An answer that was cut has no position at its end.
        """
        places: dict[int, int] = {}
        for number, at in enumerate(self.ends, 1):
            if at is not None and (self.ended or at < len(self.text)):
                places[min(max(at, start), end) - start] = number
        return places


def _common_ends(own: _Answer, theirs: _Answer) -> Iterator[tuple[int, int]]:
    """Yield the token counts up to which both tokenizations have decoded the same text."""
    same = own.text.strip() == theirs.text.strip()
    (start, end), (teacher_start, teacher_end) = _edges(own.text, theirs.text), _edges(theirs.text, own.text)
    ours = own.places(start=start, end=end)
    others = theirs.places(start=teacher_start, end=teacher_end)
    limit = common_beginning(own.text[start:end], theirs.text[teacher_start:teacher_end])
    yield from ((ours[at], others[at]) for at in sorted(ours.keys() & others.keys()) if 0 < at <= limit)
    if same and own.ended and theirs.ended:
        yield len(own.ends) + 1, len(theirs.ends) + 1


def _edges(text: str, other: str) -> tuple[int, int]:
    """The part of `text` to compare: it excludes white space at the edges if `other` differs only there.

    >>> _edges(" It is. ", "It is."), _edges(" It is.", " It is."), _edges(" It is. ", "It was.")
    ((1, 7), (0, 7), (1, 8))
    """
    if text == other:
        return 0, len(text)
    start = len(text) - len(text.lstrip())
    return start, len(text.rstrip()) if text.strip() == other.strip() else len(text)


def characters(tokenizer: Any, ids: Sequence[int]) -> tuple[str, tuple[int | None, ...]]:
    """Decode tokens inside an answer. Gives the text and, for each token, the number of characters up to its end.

    The number is None for a token that ends inside a character. Decodes a few tokens at a time, because the text of a
    token may depend on the token before it (SentencePiece drops the space of the first).
    """
    whole = _decode(tokenizer, ids)
    ends: list[int | None] = []
    start = read = done = 0
    before = ""
    for number in range(1, len(ids) + 1):
        text = _decode(tokenizer, ids[start:number])
        if text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) < len(before):
            ends.append(None)
            continue
        done += len(text) - len(before)
        ends.append(done)
        start, read = read, number
        before = _decode(tokenizer, ids[start:read])
    if ids and ends[-1] not in (None, len(whole)):
        # A decoder for which the parts do not add up to the whole: only the whole is known.
        ends = [None] * len(ids)
    return whole, (*ends[:-1], len(whole)) if ids else ()


def _cut(sample: TokenSample, length: int) -> TokenSample | None:
    """The first `length` tokens of `sample`, or None if none of them is trained."""
    mask = sample.loss_mask[:length]
    return TokenSample(sample.token_ids[:length], mask) if any(mask) else None


def _runs(sample: TokenSample) -> list[tuple[int, tuple[int, ...]]]:
    """The runs of masked tokens, each as the number of masked tokens before it and its tokens."""
    runs: list[tuple[int, tuple[int, ...]]] = []
    seen = 0
    for masked, pairs in groupby(zip(sample.token_ids, sample.loss_mask, strict=True), key=lambda pair: pair[1]):
        if masked:
            runs.append((seen, tuple(token for token, _ in pairs)))
            seen += len(runs[-1][1])
    return runs


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
