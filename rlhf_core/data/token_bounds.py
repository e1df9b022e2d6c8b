"""Bound the number of tokens of a text by its length, to learn without a tokenizer whether a row fits its limits.

The bounds hold for byte-pair encodings that leave out no character: Llama, Qwen, Gemma, Mistral, GPT-2 and DeepSeek have
such tokenizers. Any other part of a tokenizer gives no bounds, and its texts are tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_DECOMPOSED = 4
"""Code points of the longest canonical decomposition: a normal form replaces at most so many by one."""
_COUNTED = 1 << 17
"""Characters of a text that is always tokenized whole, 0.1 s: the report of its row then has the number of its tokens."""
_KEEPS_ALL = ("ByteLevel", "Digits", "Metaspace")  # pre-tokenizers that remove no character


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """The least and the most tokens that a text of some length may have.

    A token stands for at most `longest` characters besides white space, which an added token may swallow. A normal form
    may merge `composed` characters beyond ASCII into one. A token stands for at least one byte of the normalized text.
    `growth` is the factor by which a normal form may lengthen bytes beyond ASCII, and 0 if there is no upper bound.
    """

    longest: int
    composed: int
    growth: int
    end: str
    """Text of the end-of-turn token, which is this token wherever a text spells it."""

    def least(self, text: str) -> int:
        """The number of tokens that `text` has at least."""
        text = "".join(text.split())
        size = len(text)
        if self.composed > 1 and not text.isascii():  # one character of a normal form holds at most one of ASCII
            size = max(len(text.encode("ascii", "ignore")), size // self.composed)
        return -(-size // self.longest)

    def most(self, text: str) -> int:
        """The number of tokens that `text` has at most, where `growth` is not 0."""
        size = len(text.encode())
        plain = size if self.growth == 1 or size == len(text) else len(text.encode("ascii", "ignore"))
        return plain + self.growth * (size - plain)

    def shorten(self, text: str, *, tokens: int, ends: Sequence[str] = ()) -> str:
        """The text, or a beginning of it that has more than `tokens` tokens.

        The beginning of an answer keeps one of its `ends`.
        """
        # About a fifth of a text is white space, which counts as nothing. If there is more, the size doubles.
        size = max(_COUNTED, self.longest * (tokens + 1) * 5 // 4)
        while size < len(text):
            if self.least(text[:size]) > tokens:
                return text[:size] + next((end for end in ends if end in text), "")
            size *= 2
        return text


def token_bounds(tokenizer: Any, *, end: str, rows: int | None) -> TokenBounds | None:
    """The bounds of a tokenizer, or None if they are not certain.

    `end` must be a token wherever a text spells it. A tokenizer with a token beyond the `rows` that the model has
    embeddings for must tokenize every text to find it.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if type(getattr(backend, "model", None)).__name__ != "BPE":
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    normalizers, splitters = _steps(backend.normalizer), _steps(backend.pre_tokenizer)
    kinds = {one["type"] for one in normalizers}
    certain = (
        (rows is None or max(vocabulary.values()) < rows)
        and _is_always_found(end, tokenizer.added_tokens_decoder.values())
        and _covers_bytes(backend.model, splitters, vocabulary)
        and all(one["type"] in (*_NORMAL_FORMS, "Prepend") or _replaces_one(one, vocabulary) for one in normalizers)
        and all(one["type"] in _KEEPS_ALL or _splits(one) for one in splitters)
    )
    if not certain:
        return None
    forms = kinds.intersection(_NORMAL_FORMS)
    growth = 1 if not forms else 3 if forms == {"NFC"} else 0  # Unicode Standard Annex 15: NFC triples bytes at most
    # A mark at the beginning of a text is a byte that the text does not have, so there is no upper bound.
    adds = "Prepend" in kinds or any(one["type"] == "Metaspace" or one.get("add_prefix_space") for one in splitters)
    return TokenBounds(
        longest=max(map(len, vocabulary)),
        composed=_DECOMPOSED if forms else 1,
        growth=0 if adds else growth,
        end=end,
    )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, which may be a sequence."""
    if part is None:
        return []
    try:
        settings = json.loads(part.__getstate__())
    except Exception:  # a part written in Python has no settings
        return [{"type": "unknown"}]
    inner = settings.get("normalizers", settings.get("pretokenizers"))
    return [settings] if inner is None else list(inner)


def _is_always_found(end: str, added: Iterable[Any]) -> bool:
    """True if the tokenizer finds `end` first: no other added token begins inside or before it and takes a part of it."""
    own = [token for token in added if token.content == end]
    others = [token.content for token in added if token.content != end]
    plain = bool(own) and not own[0].normalized and not own[0].single_word
    return plain and not any(other.startswith(end) or end[0] in other[1:] for other in others)


def _covers_bytes(model: Any, splitters: list[dict[str, Any]], vocabulary: Mapping[str, int]) -> bool:
    """True if every byte has a token, so that no character is left out or joined to others as unknown."""
    from tokenizers.pre_tokenizers import ByteLevel

    if any(one["type"] == "ByteLevel" for one in splitters):
        return all(byte in vocabulary for byte in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _replaces_one(step: Mapping[str, Any], vocabulary: Mapping[str, int]) -> bool:
    """True if a normalizer replaces one character by one that is a token: "▁" for a space."""
    pattern = step["pattern"].get("String", "") if step["type"] == "Replace" else ""
    return len(pattern) == 1 and len(step["content"]) == 1 and step["content"] in vocabulary


def _splits(step: Mapping[str, Any]) -> bool:
    """True if a pre-tokenizer splits texts at a pattern and keeps the text of the pattern."""
    return step["type"] == "Split" and step["behavior"] != "Removed"
