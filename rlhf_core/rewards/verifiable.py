"""Rewards that a program can check: numbers, exact answers and formats. Each is a `RewardFunction`.

All but the format rewards compare with `prompt.label` and raise ValueError where a prompt has none, or an empty one.
They return None where the label is a table or a list of texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from rlhf_core.rewards.library.labels import expected_texts, normalized
from rlhf_core.text import fold
from rlhf_core.types import Generation

_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:[\xa0\u2009\u202f]\d{3})*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\w))?"
)
"""A dash after a digit, a letter or a bracket is a range or a subtraction, not a sign."""
_SIGNED = re.compile(r"(?<![\w)])-\\?[$€£¥](?=[\d.])")  # a minus before a currency sign
_SEVERAL = re.compile(r"\s*(?:\[|\{.*,)")  # a list or a set, of whose numbers none is the answer
_THINK_THEN_ANSWER = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")


# ---------------------------------------------------------------- rewards


def final_number(generations: Sequence[Generation]) -> list[float | None]:
    """Score 1.0 if the answer's final number equals the label's, else 0.0 (GSM8K, arXiv 2110.14168)."""

    def equal(text: str, label: str) -> bool:
        number = [read_final_number(one) for one in expected_texts(label)[-1:] if not _SEVERAL.match(one)]
        if number in ([], [None]):
            raise ValueError(f"the label {label!r} holds no number")
        return read_final_number(text) == number[0]

    return _against_label(generations, equal, texts=lambda label: (label,))


def exact_match(generations: Sequence[Generation]) -> list[float | None]:
    """Score 1.0 if the answer is the label, ignoring case, outer white space and a final period."""
    return _against_label(generations, lambda text, label: normalized(text) == normalized(label))


def boxed_match(generations: Sequence[Generation]) -> list[float | None]:
    r"""Score 1.0 if the last `\boxed{...}` holds the label: the same number, or the same text."""

    def equal(text: str, label: str) -> bool:
        boxed = read_boxed(text)
        return boxed is not None and _same(boxed, label)

    return _against_label(generations, equal)


def answer_tag_match(generations: Sequence[Generation]) -> list[float | None]:
    """Score 1.0 if `<think>...</think><answer>...</answer>` holds the label as its answer."""

    def equal(text: str, label: str) -> bool:
        match = _THINK_THEN_ANSWER.fullmatch(text)
        return match is not None and _same(match.group(2), label)

    return _against_label(generations, equal)


def think_format(generations: Sequence[Generation]) -> list[float]:
    """Score 1.0 if the answer is one `<think>` block and then one `<answer>` block, neither empty nor nested."""

    def well_formed(text: str) -> bool:
        match = _THINK_THEN_ANSWER.fullmatch(text)
        return match is not None and all(part.strip() and not _TAG.search(part) for part in match.groups())

    return [float(well_formed(generation.completion.text)) for generation in generations]


def boxed_format(generations: Sequence[Generation]) -> list[float]:
    r"""Score 1.0 if the answer has exactly one `\boxed{...}` and it is closed."""
    texts = [generation.completion.text for generation in generations]
    return [float(text.count(r"\boxed{") == 1 and read_boxed(text) is not None) for text in texts]


def final_line_format(generations: Sequence[Generation]) -> list[float]:
    """Score 1.0 if the answer ended by itself with its one `####` before a number and nothing after it (GSM8K)."""

    def well_formed(generation: Generation) -> bool:
        before, _, last = generation.completion.text.rpartition("####")
        return "####" not in before and before.endswith("\n") and _whole_number(last) is not None

    answered = finished(generations)
    return [done * well_formed(generation) for done, generation in zip(answered, generations, strict=True)]


def finished(generations: Sequence[Generation]) -> list[float]:
    """Score 1.0 if the answer ended by itself, 0.0 if the token limit cut it off."""
    return [float(generation.completion.finish_reason == "stop") for generation in generations]


# ---------------------------------------------------------------- reading answers


def read_final_number(text: str) -> Decimal | None:
    r"""Find the number after the last `####`, else in the last `\boxed{}`, else the last number of the text.

    >>> read_final_number("so 3 apples cost $1,050.00. #### 1,050.")
    Decimal('1050')
    """
    text = _SIGNED.sub("-", fold(text))
    _, marker, after = text.rpartition("####")
    if marker:
        return _first_number(after)
    boxed = read_boxed(text)
    if boxed is not None:
        return _first_number(boxed)
    numbers = _NUMBER.findall(text)
    return _decimal(numbers[-1]) if numbers else None


def read_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, braces balanced; None if none is found or it is not closed.

    >>> read_boxed(r"\boxed{1} then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    _, marker, rest = text.rpartition(r"\boxed{")
    if not marker:
        return None
    depth = 1
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:position]
    return None


# ---------------------------------------------------------------- private


def _against_label(
    generations: Sequence[Generation],
    equal: Callable[[str, str], bool],
    *,
    texts: Callable[[str], Sequence[str]] = expected_texts,
) -> list[float | None]:
    found: list[float | None] = []
    for generation in generations:
        label = generation.prompt.label
        boxed = read_boxed(label)
        if not normalized(label if boxed is None else boxed):
            raise ValueError(f"prompt {generation.prompt.id} has no label to check against: {label!r}")
        text, expected = generation.completion.text, texts(label if boxed is None else boxed)
        found.append(float(any(equal(text, one) for one in expected)) if expected else None)
    return found


def _same(text: str, label: str) -> bool:
    number, expected = _whole_number(text), _whole_number(label)
    if number is not None and expected is not None:
        return number == expected
    return normalized(text) == normalized(label)


def _whole_number(text: str) -> Decimal | None:
    """The text as a number if it is nothing else, save a currency or percent sign."""
    text = _SIGNED.sub("-", fold(text).strip()).strip("$%").rstrip(".").strip().removeprefix("+")
    return _decimal(text) if _NUMBER.fullmatch(text) else None


def _first_number(text: str) -> Decimal | None:
    match = _NUMBER.search(text)
    return _decimal(match.group()) if match else None


def _decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[,\s]", "", text))
