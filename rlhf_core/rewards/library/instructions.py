"""Rewards for instructions that a program can check, in the manner of IFEval (arXiv 2311.07911).

A prompt's label is JSON: the instructions, and the topic of the answer.

    {"instructions": [{"kind": "at_most_words", "count": 12}, {"kind": "no_commas"}],
     "topic": ["rain", "water", "cloud"], "min_words": 6}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_core.errors import RewardError, explain
from rlhf_core.rewards.library.labels import against_labels

Options = Mapping[str, Any]

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SENTENCE_END = re.compile(r"[.!?]+(?:[\"'”’)]*)(?:\s|$)")
_MARKS = ".,;:!?\"'”’()"
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


def words(text: str) -> list[str]:
    """Split a text into its words, without punctuation.

    >>> words("It's a well-known fact, isn't it?")
    ["It's", 'a', 'well-known', 'fact', "isn't", 'it']
    """
    return _WORD.findall(text)


def _folded(text: str) -> list[str]:
    return [word.casefold() for word in words(text)]


def _starts(text: str, options: Options) -> bool:
    wanted = _wanted(options)
    return _folded(text)[: len(wanted)] == wanted


def _ends(text: str, options: Options) -> bool:
    wanted = _wanted(options)
    return _folded(text)[-len(wanted) :] == wanted


def _contains(text: str, options: Options) -> bool:
    wanted, said = _wanted(options), _folded(text)
    return any(said[place : place + len(wanted)] == wanted for place in range(len(said)))


def _wanted(options: Options) -> list[str]:
    """The words that the answer must have. Raises TypeError for an option that names none."""
    word = options["word"]
    # Of "C++" only the C would be looked for.
    if not isinstance(word, str) or not words(word) or words(word) != [one.strip(_MARKS) for one in word.split()]:
        raise TypeError(f"word = {word!r} is no word, or has other signs")
    return _folded(word)


def _count(options: Options) -> int:
    """The number that an instruction asks for. Raises TypeError unless it is a whole number of at least 1."""
    count = options["count"]
    if isinstance(count, bool) or not isinstance(count, (int, float)) or count % 1 or count < 1:
        raise TypeError(f"count = {count!r} is no whole number from 1 on")
    return int(count)


def _json_object(text: str, options: Options) -> bool:
    """Whether the text, without a fence around it, is an object with this one key and a text as its value."""
    try:
        value = json.loads(_FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return False
    key = options["key"]
    if not isinstance(key, str):
        raise TypeError(f"key = {key!r} is no text")
    return isinstance(value, dict) and set(value) == {key} and isinstance(value[key], str)


def _quoted(text: str, options: Options) -> bool:
    text = text.strip()
    return bool(words(text)) and text[0] in '"“' and text[-1] in '"”'


def _sentences(text: str, options: Options) -> bool:
    ends, count = [found.end() for found in _SENTENCE_END.finditer(text.strip())], _count(options)
    return len(ends) == count and ends[-1:] == [len(text.strip())] and bool(words(text))


CHECKS: Mapping[str, Callable[[str, Options], bool]] = {
    # As IFEval: letters that have a case are among the text, so digits, signs and scripts without case are neither.
    "lowercase": lambda text, options: text.islower(),
    "uppercase": lambda text, options: text.isupper(),
    "at_most_words": lambda text, options: 0 < len(words(text)) <= _count(options),
    "at_least_words": lambda text, options: len(words(text)) >= _count(options),
    "first_word": _starts,
    "last_word": _ends,
    "keyword": _contains,
    "no_commas": lambda text, options: "," not in text and bool(words(text)),
    "exclamation": lambda text, options: text.rstrip().endswith("!") and bool(words(text)),
    "question": lambda text, options: text.rstrip().endswith("?") and bool(words(text)),
    "quoted": _quoted,
    "json": _json_object,
    "sentences": _sentences,
}
"""Kind of instruction -> whether a text follows it."""


def follows(text: str, instruction: Options, *, loose: bool = False) -> bool:
    """Whether `text` follows one instruction.

    `loose` also accepts a text that follows it without its first or its last line, or without asterisks, as IFEval's
    loose accuracy does. Raises KeyError for a kind or an option that is missing, TypeError for an
    option of another kind.

    >>> follows("Rain is water that falls.", {"kind": "at_most_words", "count": 6})
    True
    """
    check = CHECKS[instruction["kind"]]
    return any(check(variant, instruction) for variant in (_variants(text) if loose else [text]))


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = [text, "\n".join(lines[1:]), "\n".join(lines[:-1]), "\n".join(lines[1:-1])]
    return [variant.strip() for one in cut for variant in (one, one.replace("*", "")) if variant.strip()]


# ---------------------------------------------------------------- rewards


def instructions_followed(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    partial: bool = False,
    loose: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Score 1.0 if the answer follows all instructions of its label, else 0.0 (`partial`: the fraction it follows).

    None for a prompt without a label; RewardError for a label that is not as described above.
    """

    def judge(text: str, label: str) -> float:
        instructions = _read(label)["instructions"]
        try:
            held = [follows(text, one, loose=loose) for one in instructions]
        except (KeyError, TypeError) as error:
            raise RewardError(_unchecked(label, error)) from None
        return sum(held) / len(held) if partial else float(all(held))

    return against_labels(completions, labels, judge)


def on_topic(
    prompts: Sequence[str], completions: Sequence[str], labels: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """Score 1.0 if the answer has `min_words` words and a word that starts like a word of `topic`, else 0.0.

    An instruction for fewer words lowers `min_words`. None for a prompt without a label.
    """

    def judge(text: str, label: str) -> float:
        read = _read(label)
        said = _folded(text)
        about = any(word.startswith(stem.casefold()) for word in said for stem in read["topic"])
        try:
            counts = [_count(one) for one in read["instructions"] if one["kind"] == "at_most_words"]
        except (KeyError, TypeError) as error:
            raise RewardError(_unchecked(label, error)) from None
        return float(about and len(said) >= min([read["min_words"], *counts]))

    return against_labels(completions, labels, judge)


_REMEDY = "see rlhf_core.rewards.library.instructions for the form of a label"


def _unchecked(label: str, error: Exception) -> str:
    return explain("label", label[:80], f"has an instruction that cannot be checked ({error})", _REMEDY)


def _read(label: str) -> dict[str, Any]:
    try:
        read = json.loads(label)
        if not isinstance(read, dict) or not read["instructions"] or not {"topic", "min_words"} <= set(read):
            raise ValueError("instructions, topic and min_words are needed")
    except (ValueError, KeyError, RecursionError) as error:
        raise RewardError(explain("label", label[:80], f"describes no instructions ({error})", _REMEDY)) from None
    return read
