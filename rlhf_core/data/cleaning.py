"""Remove duplicates, and training rows that overlap with the evaluation prompts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from rlhf_core.data.formats import Example, Turns
from rlhf_core.data.validation import DropReport

_WORD = re.compile(r"[^\W\d_]+")
_NOT_WORD = re.compile(r"[^\w]+")


def normalize(turns: Turns) -> str:
    """Return the text of `turns` with roles, NFKC-normalized and case-folded, reduced to words and single spaces."""
    text = "\n".join(f"{message.role} {message.content}" for message in turns)
    return _NOT_WORD.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def exact(turns: Turns) -> str:
    """Return the text of `turns` with normalized white space. Unlike `normalize` it keeps case and punctuation."""
    return "\n".join(f"{message.role}: {' '.join(message.content.split())}{message.tool_fields}" for message in turns)


def without_repeated_prompts(examples: Sequence[Example]) -> tuple[list[Example], int]:
    """Return `examples` with answers that do not repeat their prompt, and in how many examples they did.

    Only if nearly all of them do, with prompts of words: then the source stores whole texts, prompt and answer together.
    """
    answered = [example for example in examples if (example.chosen or example.rejected) and not example.steps]
    repeating = {id(example) for example in answered if all(map(_repeats(example), _answers(example)))}
    telling = sum(
        len(_WORD.findall(example.prompt[-1].content)) >= 2 for example in answered if id(example) in repeating
    )
    if len(repeating) < 0.95 * len(answered) or 2 * telling <= len(repeating):
        return list(examples), 0
    return [_unrepeated(example) if id(example) in repeating else example for example in examples], len(repeating)


def deduplicate(examples: Iterable[Example], report: DropReport) -> list[Example]:
    """Return `examples` without those that repeat the prompt and answers of an earlier one, ignoring white space.

    Punctuation and signs count: 3 - 2 and 3 + 2 are different prompts.
    """
    seen: dict[tuple[str, str, str], Example] = {}
    for example in examples:
        key = (exact(example.prompt), exact(example.chosen), exact(example.rejected))
        if key in seen:
            first = seen[key].origin
            report.add(example.source, example.origin, f"duplicate: of {first.file}:{first.line}")
        else:
            seen[key] = example
    return list(seen.values())


def decontaminate(
    training: Sequence[Example], evaluation: Iterable[Example], *, ngram: int | None, report: DropReport
) -> list[Example]:
    """Return the `training` rows that do not begin with a prompt of `evaluation`, ignoring white space and case.

    A longer conversation that begins with an evaluation prompt is removed too, because one of its turns is the answer.

    With `ngram`, a row is also removed if its prompt or an answer shares that many consecutive words with an evaluation
    prompt (the overlap test of GPT-3, arXiv 2005.14165, appendix C).
    """
    held_out = list(evaluation)
    prompts = {exact(example.prompt).casefold() for example in held_out if example.prompt}
    grams = {gram for example in held_out for gram in _ngrams(example.prompt, ngram)} if ngram else set()
    kept = []
    for example in training:
        if any(exact(opening).casefold() in prompts for opening in _openings(example)):
            report.add(example.source, example.origin, "contaminated: it begins with an evaluation prompt")
        elif grams and any(
            gram in grams
            for turns in (example.prompt, example.chosen, example.rejected)
            for gram in _ngrams(turns, ngram)
        ):
            report.add(
                example.source, example.origin, f"contaminated: shares {ngram} words in a row with an evaluation prompt"
            )
        else:
            kept.append(example)
    return kept


def _openings(example: Example) -> Iterator[Turns]:
    """Yield the prompt, and the turns before each assistant turn of the prompt and of either answer."""
    yield example.prompt
    for answer in (example.chosen, example.rejected):
        turns = example.prompt + answer
        for index, message in enumerate(turns):
            if message.role == "assistant" and index > 0:
                yield turns[:index]


def _ngrams(turns: Turns, size: int | None) -> Iterator[tuple[str, ...]]:
    """Yield the word n-grams of each turn, without its role."""
    if size is None:
        return
    for message in turns:
        words = normalize((message,)).split()[1:]
        for start in range(len(words) - size + 1):
            yield tuple(words[start : start + size])


def _answers(example: Example) -> list[Turns]:
    return [answer for answer in (example.chosen, example.rejected) if answer]


def _repeats(example: Example) -> Callable[[Turns], bool]:
    asked = example.prompt[-1].content.strip() if example.prompt else ""

    def repeats(answer: Turns) -> bool:
        text = answer[0].content.lstrip()
        rest = text[len(asked) :]
        return bool(asked and rest.strip()) and text.startswith(asked) and not (asked[-1:] + rest[:1]).isalnum()

    return repeats


def _unrepeated(example: Example) -> Example:
    def rest(answer: Turns) -> Turns:
        text = answer[0].content.lstrip()[len(example.prompt[-1].content.strip()) :].lstrip()
        return (replace(answer[0], content=text), *answer[1:])

    chosen, rejected = (rest(answer) if answer else answer for answer in (example.chosen, example.rejected))
    return replace(example, chosen=chosen, rejected=rejected)
