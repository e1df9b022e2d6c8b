"""Rewards for instructions that a program can check, in the manner of IFEval (arXiv 2311.07911).

A prompt's label is JSON: the instructions, and what the answer must be about.

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
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$")


def words(text: str) -> list[str]:
    """Return the words of a text, without punctuation.

    >>> words("It's a well-known fact, isn't it?")
    ["It's", 'a', 'well-known', 'fact', "isn't", 'it']
    """
    return _WORD.findall(text)


def _folded(text: str) -> list[str]:
    return [word.casefold() for word in words(text)]


def _starts(text: str, options: Options) -> bool:
    wanted = _folded(options["word"])
    return _folded(text)[: len(wanted)] == wanted


def _ends(text: str, options: Options) -> bool:
    wanted = _folded(options["word"])
    return _folded(text)[-len(wanted) :] == wanted


def _contains(text: str, options: Options) -> bool:
    return options["word"].casefold() in _folded(text)


def _json_object(text: str, options: Options) -> bool:
    """Return whether the text, without a fence around it, is an object with this one key and a text as its value."""
    try:
        value = json.loads(_FENCE.sub("", text.strip()))
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and set(value) == {options["key"]} and isinstance(value[options["key"]], str)


def _quoted(text: str, options: Options) -> bool:
    text = text.strip()
    return len(text) > 2 and text[0] in '"“' and text[-1] in '"”'


def _sentences(text: str, options: Options) -> bool:
    text = text.strip()
    ends = _SENTENCE_END.findall(text)
    return len(ends) == options["count"] and _SENTENCE_END.search(text[-2:]) is not None


CHECKS: Mapping[str, Callable[[str, Options], bool]] = {
    "lowercase": lambda text, options: text == text.lower() and bool(words(text)),
    "uppercase": lambda text, options: text == text.upper() and bool(words(text)),
    "at_most_words": lambda text, options: 0 < len(words(text)) <= options["count"],
    "at_least_words": lambda text, options: len(words(text)) >= options["count"],
    "first_word": _starts,
    "last_word": _ends,
    "keyword": _contains,
    "no_commas": lambda text, options: "," not in text and bool(words(text)),
    "exclamation": lambda text, options: text.rstrip().endswith("!"),
    "question": lambda text, options: text.rstrip().endswith("?"),
    "quoted": _quoted,
    "json": _json_object,
    "sentences": _sentences,
}
"""Kind of instruction -> whether a text follows it."""


def follows(text: str, instruction: Options, *, loose: bool = False) -> bool:
    """Return whether `text` follows one instruction.

    `loose` also accepts a text that follows it without its first or its last line, or without asterisks, as IFEval's
    loose accuracy does. Raises KeyError for a kind or an option that is missing.

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
    """Return 1.0 where the answer follows all instructions of its label, else 0.0 (`partial`: the share it follows).

    None for a prompt without a label; RewardError for a label that is not as described above.
    """

    def judge(text: str, label: str) -> float:
        instructions = _read(label)["instructions"]
        try:
            held = [follows(text, one, loose=loose) for one in instructions]
        except (KeyError, TypeError) as error:
            raise RewardError(explain("label", label[:80], f"has no instruction {error}", _REMEDY)) from None
        return sum(held) / len(held) if partial else float(all(held))

    return against_labels(completions, labels, judge)


def on_topic(
    prompts: Sequence[str], completions: Sequence[str], labels: Sequence[str | None], **columns: Any
) -> list[float | None]:
    """Return 1.0 where the answer has `min_words` words and one of them starts like a word of `topic`, else 0.0.

    An instruction for fewer words lowers `min_words`. None for a prompt without a label.
    """

    def judge(text: str, label: str) -> float:
        read = _read(label)
        said = _folded(text)
        about = any(word.startswith(stem.casefold()) for word in said for stem in read["topic"])
        counts = [one["count"] for one in read["instructions"] if one["kind"] == "at_most_words"]
        return float(about and len(said) >= min([read["min_words"], *counts]))

    return against_labels(completions, labels, judge)


_REMEDY = "see rlhf_core.rewards.library.instructions for the form of a label"


def _read(label: str) -> dict[str, Any]:
    try:
        read = json.loads(label)
        if not isinstance(read, dict) or not read["instructions"] or not {"topic", "min_words"} <= set(read):
            raise ValueError("instructions, topic and min_words are needed")
    except (ValueError, KeyError, RecursionError) as error:
        raise RewardError(explain("label", label[:80], f"describes no instructions ({error})", _REMEDY)) from None
    return read
