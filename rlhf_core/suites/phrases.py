"""Find phrases in texts regardless of apostrophes and spaces. Imports nothing, so profiles are checked quickly."""

import re
from collections.abc import Sequence
from functools import lru_cache

_LETTER = r"[^\W_]"
_APOSTROPHES = str.maketrans({"\u2019": "'", "\u2018": "'", "`": "'", "\u02bc": "'"})


def plain(text: str) -> str:
    """A text in lower case, with straight apostrophes and single spaces.

    >>> plain(" I\u2019m   sorry")
    "i'm sorry"
    """
    return " ".join(text.translate(_APOSTROPHES).lower().split())


def starts_with_any(text: str, phrases: Sequence[str], *, characters: int) -> bool:
    """Whether a phrase is among the first characters of `text`, as whole words; both are compared as `plain`.

    >>> starts_with_any("Your Wi-Fi can't connect", ["i can't"], characters=200)
    False
    """
    # A phrase that ends at the last character counts only if its word ends there, so one character more is read.
    start = plain(text)[: characters + 1]
    return any((found := _pattern(one).search(start)) is not None and found.end() <= characters for one in phrases)


@lru_cache(maxsize=1024)
def _pattern(phrase: str) -> re.Pattern[str]:
    # "x-i can't" is no "i can't"; "sorry--i can't" is, and so is "_i can't_" in Markdown.
    return re.compile(rf"(?<!{_LETTER})(?<!{_LETTER}-){re.escape(plain(phrase))}(?!{_LETTER})")
