"""Tokens of a piece of text where it stands, for tokenizers to which the beginning of a text is something of its own.

Llama 2, Zephyr, TinyLlama and others with a SentencePiece vocabulary write a "▁" before a text, as if a space came first.
Tokenised alone, a piece from the middle gains a "▁" that the whole text does not have there. Byte-level tokenizers have no
such mark, and their pieces are tokenised alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core.errors import DataError, explain

MARKS = ("▁", "Ġ")
"""What such a tokenizer writes for a space, and so for the beginning of a text."""
ANCHORS = ("\n", "a", ".", "0")
"""Texts after which a piece is tokenised, in order of preference; one of them does not grow together with it."""

Ids = tuple[int, ...]


def encode(tokenizer: Any, text: str) -> Ids:
    """Return the tokens of a whole text, without special tokens that are not in it."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def marks_beginning(tokenizer: Any) -> bool:
    """Return whether `tokenizer` writes a mark before a text that begins with a letter."""
    first = tokenizer.convert_ids_to_tokens(list(encode(tokenizer, "a")))[:1]
    return any(str(token).startswith(MARKS) for token in first)


def difference(encoded: Callable[[str], Ids], before: str, text: str) -> Ids | None:
    """Return what `text` adds to the tokens of `before`; None where a token reaches across the border."""
    head, whole = encoded(before), encoded(before + text)
    return whole[len(head) :] if whole[: len(head)] == head else None


def continued(tokenizer: Any, text: str) -> Ids:
    """Return the tokens of `text` inside a running text, none of them reaching across its beginning."""
    if not marks_beginning(tokenizer):
        return encode(tokenizer, text)
    for anchor in ANCHORS:
        added = difference(lambda whole: encode(tokenizer, whole), anchor, text)
        if added is not None:
            return added
    rule = "this tokenizer gives it no tokens of its own inside a running text"
    raise DataError(explain("text", text[:80], rule, "let it begin with a line break"))


def following(tokenizer: Any, text: str, *, after: int) -> Ids:
    """Return the tokens of `text` where it follows the token `after`, which stays as it is.

    A special token ends a text for some tokenizers, which then mark the beginning of the next.
    """
    if marks_beginning(tokenizer) and after in tokenizer.all_special_ids:
        special = str(tokenizer.convert_ids_to_tokens(after))
        added = difference(lambda whole: encode(tokenizer, whole), special, text)
        if added is not None:
            return added
    return continued(tokenizer, text)


def token_text(tokenizer: Any, token: int, *, skip_special_tokens: bool) -> str:
    """Return the text of one token as it is inside a running text, with the space that it may begin with."""
    before = encode(tokenizer, "a") if marks_beginning(tokenizer) else ()
    # The decoder of a tokenizer that marks beginnings drops the space of the first token that it is given.
    shown = str(tokenizer.decode([*before, token], skip_special_tokens=skip_special_tokens))
    return shown[len(str(tokenizer.decode(list(before)))) :] if before else shown
