"""Compare texts that people and models wrote in different characters for the same thing."""

import unicodedata

_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}  # full-width forms of ASCII
_SIGNS = dict.fromkeys((0x2010, 0x2011, 0x2012, 0x2013, 0x2212, 0xFE58, 0xFE63), "-")
_HIDDEN = dict.fromkeys((0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), 0x2060, *range(0x2066, 0x206A), 0xFEFF))
_FOLDED = _WIDE | _SIGNS | _HIDDEN | {0x2044: "/", 0x2215: "/", 0x066A: "%", 0x066B: ".", 0x066C: ",", 0x3000: " "}


def fold(text: str) -> str:
    """A text in the normal form NFC, with ASCII for digits, signs and full-width forms, and without hidden marks.

    >>> fold("\u22125\uff0e5")
    '-5.5'
    """
    if text.isascii():
        return text
    digits = {ord(one): f"{unicodedata.decimal(one)}" for one in {*text} if one.isdecimal()}
    return unicodedata.normalize("NFC", text).translate(digits | _FOLDED)
