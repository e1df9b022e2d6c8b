"""Tokenize texts, and pieces of a running text without changing the tokens before them.

Some tokenizers mark the beginning of a text, and would mark the beginning of each piece, too.
"""

from collections.abc import Callable, Sequence
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.types import Column, ids

MARKS = ("▁", "Ġ")  # marks that such a tokenizer writes for a space, and therefore at the beginning of a text
ANCHORS = ("\n", "a", ".", "0")
"""Texts to put before a piece when it is tokenized, in order of preference; the first that does not merge is used."""

Ids = Column[int]


def encode(tokenizer: Any, text: str) -> Ids:
    """Tokenize a whole text, without adding special tokens."""
    return encode_all(tokenizer, [text])[0]


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """The tokens of each text, without special tokens around it. A fast tokenizer encodes several texts on all cores."""
    if not texts:
        return []
    return [
        ids(one) for one in tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    ]


def marks_beginning(tokenizer: Any) -> bool:
    """Whether `tokenizer` writes a mark before a text that begins with a letter."""
    first = tokenizer.convert_ids_to_tokens(list(encode(tokenizer, "a")))[:1]
    return any(str(token).startswith(MARKS) for token in first)


def difference(encoded: Callable[[str], Ids], before: str, text: str) -> Ids | None:
    """The tokens that `text` adds after the tokens of `before`, or None if a token crosses the border."""
    head, whole = encoded(before), encoded(before + text)
    return whole[len(head) :] if whole[: len(head)] == head else None


def continued(tokenizer: Any, text: str) -> Ids:
    """Tokenize `text` inside a running text, so that no token crosses its beginning."""
    if not marks_beginning(tokenizer):
        return encode(tokenizer, text)
    for anchor in ANCHORS:
        added = difference(lambda whole: encode(tokenizer, whole), anchor, text)
        if added is not None:
            return added
    rule = "in the middle of a text, this tokenizer merges it with the tokens before it"
    raise DataError("text", text[:80], rule, "start it with a line break")


def following(tokenizer: Any, text: str, *, after: int) -> Ids:
    """Tokenize `text` after the token `after`, which does not change.

    For some tokenizers an added token, special or not, ends a text, so they mark the beginning of the text after it.
    """
    if marks_beginning(tokenizer) and after in tokenizer.added_tokens_decoder:
        before = str(tokenizer.convert_ids_to_tokens(after))
        added = difference(lambda whole: encode(tokenizer, whole), before, text)
        if added is not None:
            return added
    return continued(tokenizer, text)


def token_text(tokenizer: Any, token: int, *, skip_special_tokens: bool) -> str:
    """Decode one token inside a running text, including the space that it may begin with."""
    before = encode(tokenizer, "a") if marks_beginning(tokenizer) else ids(())
    # If a tokenizer marks beginnings, its decoder drops the space of the first token.
    shown = str(tokenizer.decode([*before, token], skip_special_tokens=skip_special_tokens))
    return shown[len(str(tokenizer.decode(list(before)))) :] if before else shown
