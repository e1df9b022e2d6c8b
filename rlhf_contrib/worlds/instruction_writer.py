"""Write answers that follow the instructions of the world of verifiable instructions, as demonstrations."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_contrib.worlds.instruction_phrases import ANSWERS

ATTEMPTS = 40  # tries of the writer; some answers are too long for some limits


def write_answer(
    question: str, instructions: Sequence[Mapping[str, Any]], rng: random.Random, *, min_words: int = 6
) -> str | None:
    """Write an answer to a question that follows all instructions; None if no attempt does.

    It has `min_words` words, or as many as the instructions allow.

    >>> write_answer("What is rain?", [{"kind": "lowercase"}, {"kind": "at_most_words", "count": 10}], random.Random(0))
    'rain is water that falls from clouds.'
    """
    asked = {one["kind"]: one for one in instructions}
    most = asked["at_most_words"]["count"] if "at_most_words" in asked else sys.maxsize
    for _ in range(ATTEMPTS):
        text = _attempt(rng.choice(ANSWERS[question]), asked, rng)
        if min(min_words, most) <= len(text.split()) <= most:
            return text
    return None


def _attempt(text: str, asked: Mapping[str, Mapping[str, Any]], rng: random.Random) -> str:
    """Change `text` to follow every instruction except the word limit."""
    if "keyword" in asked:
        text = f"{text} {rng.choice(WITH_KEYWORD[asked['keyword']['word']])}"
    if "first_word" in asked:
        text = f"{asked['first_word']['word']}, {text[0].lower()}{text[1:]}"
    if "last_word" in asked:
        text = f"{text.rstrip('.')}, {rng.choice(BEFORE_CLOSER[asked['last_word']['word']])}."
    if "exclamation" in asked:
        text = f"{text.rstrip('.')}!"
    if "no_commas" in asked:
        text = text.replace(",", "")
    if "lowercase" in asked:
        text = text.lower()
    return json.dumps({asked["json"]["key"]: text}) if "json" in asked else text


# ---------------------------------------------------------------- phrases

WITH_KEYWORD: Mapping[str, tuple[str, ...]] = {
    "good": ("That is good.", "It is a good thing."),
    "world": ("The whole world knows it.", "You find it all over the world."),
    "people": ("Most people know it.", "That matters to people."),
    "simple": ("It is simple.", "The idea is simple."),
    "often": ("We see it often.", "That happens often."),
    "many": ("There are many.", "It matters to many."),
}
"""Keyword -> sentences that contain it."""

BEFORE_CLOSER: Mapping[str, tuple[str, ...]] = {
    "today": ("today", "and it is so today"),
    "indeed": ("indeed", "very much indeed"),
    "always": ("always", "and that is so always"),
    "friend": ("my friend", "dear friend"),
    "truly": ("truly", "yes, truly"),
    "done": ("and we are done", "and it is done"),
}
"""Closing word -> sentence endings with it."""
