"""Bounds on the number of tokens, compared with the tokens of texts that are hard for them."""

from itertools import product
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlhf_core.data.pieces import encode
from rlhf_core.data.token_bounds import TokenBounds, token_bounds
from tests.rlhf_core.data.small_tokenizers import KINDS, ZEPHYR, tokenizer_of

END = AddedToken("<|im_end|>", special=True, normalized=False)
DIGITS = pre_tokenizers.Split(Regex(r"\d{1,3}|\s+|\p{L}+|[^\s\p{L}\d]+"), "isolated")  # as in Llama 3
REMOVED = pre_tokenizers.Split(" ", "removed")
TEXTS = [
    *("Hello Maria, how are you?", "12 + 30 = 42", "a" * 300, " " * 50, "\n\n\t  \u00a0", "你好，世界", "🎉🎉", "e\u0301" * 40),
    *("ﬁ ﬃ ﬅ", "\ufb2c\u0958\u1f82", "\u03b1\u0313\u0300\u0345" * 30, "각" * 20, "\u1100\u1161\u11a8" * 30, "<|im_end|>  \n x"),
    *("▁▁ ▁", "<|im_end|><|im_end|>", "“quoted” — text", "Hello Maria" * 50),
]  # fmt: skip


def byte_level(*, normalizer: Any = None, splitter: Any = None, added: tuple[AddedToken, ...] = (END,)) -> Any:
    """A tokenizer of bytes with pieces that it learns from TEXTS."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter is None)
    tokenizer.pre_tokenizer = level if splitter is None else pre_tokenizers.Sequence([splitter, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return wrapped(tokenizer, added)


def wrapped(tokenizer: Tokenizer, added: tuple[AddedToken, ...] = (END,)) -> Any:
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")


def marking(kind: str) -> Any:
    return tokenizer_of(kind, ZEPHYR)


CERTAIN = {
    "GPT-2": byte_level,
    "Llama 3": lambda: byte_level(splitter=DIGITS),
    "Qwen": lambda: byte_level(normalizer=normalizers.NFC()),
    "NFKC": lambda: byte_level(normalizer=normalizers.NFKC()),
    "Phi": lambda: byte_level(added=(AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),)),
    **{kind: lambda kind=kind: marking(kind) for kind in KINDS if kind.startswith("bpe")},
}
"""Makers of tokenizers with the parts of a family, by its name."""


def bounds_of(tokenizer: Any) -> TokenBounds:
    bounds = token_bounds(tokenizer, end=tokenizer.eos_token, rows=None)
    assert bounds is not None
    return bounds


@pytest.mark.parametrize("name", CERTAIN)
def test_every_text_has_its_tokens_between_the_bounds(name: str) -> None:
    tokenizer = CERTAIN[name]()
    bounds = bounds_of(tokenizer)
    for text in [*TEXTS, *(one + other for one, other in product(TEXTS, TEXTS))]:
        tokens = len(encode(tokenizer, text))
        assert bounds.least(text) <= tokens, text
        if bounds.growth:
            assert tokens <= bounds.most(text), text


def test_the_bounds_are_close_where_they_can_be() -> None:
    bounds, qwen = bounds_of(CERTAIN["GPT-2"]()), bounds_of(CERTAIN["Qwen"]())
    # the longest piece that is learned has L letters: 300 of "a" are at least 300 / L tokens
    assert bounds.least("a" * 300) == -(-300 // bounds.longest)
    assert bounds.least(" " * 300) == 0
    assert (bounds.most("aé"), qwen.most("aé"), qwen.most("abc")) == (3, 1 + 3 * 2, 3)
    # composed to at least 40 / 4 characters, and the 40 letters of ASCII are in different ones
    assert qwen.least("\u0301" * 40 * qwen.longest) == 10
    assert qwen.least("e\u0301" * 40 * qwen.longest) == 40
    assert [bounds_of(CERTAIN[name]()).growth for name in ("NFKC", "Phi", "bpe-prepend", "bpe-first")] == [0, 1, 0, 0]


def overlapping(content: str) -> Any:
    return byte_level(added=(END, AddedToken(content, special=False, normalized=False)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: byte_level(normalizer=normalizers.Strip()),
        lambda: byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        lambda: byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
        lambda: byte_level(normalizer=normalizers.Replace("a", "~~")),
        lambda: byte_level(splitter=REMOVED),
        lambda: overlapping("<|im_end|>\n"),
        lambda: overlapping("x<"),
        lambda: byte_level(added=(AddedToken("<|im_end|>", special=True, normalized=False, single_word=True),)),
        lambda: wrapped(Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))),
        lambda: wrapped(Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))),
        lambda: marking("unigram-always"),
    ],
)
def test_a_tokenizer_with_other_parts_has_no_bounds(make: Any) -> None:
    tokenizer = make()
    assert token_bounds(tokenizer, end=tokenizer.eos_token, rows=None) is None


def test_a_tokenizer_with_more_tokens_than_its_model_has_no_bounds() -> None:
    tokenizer = byte_level()
    found = [token_bounds(tokenizer, end="<|im_end|>", rows=len(tokenizer) - less) for less in (0, 1)]
    assert [one is None for one in found] == [False, True]


def test_a_long_text_is_shortened_to_one_that_is_too_long_as_well() -> None:
    bounds = bounds_of(byte_level())
    blank_first, short = " " * 200_000 + "Hello Maria" * 100_000 + "<|im_end|>\n", "Hello Maria" * 11_000
    for answer in (False, True):
        cut = bounds.shorten(blank_first, tokens=100, ends=["<|call|>", "<|im_end|>"] if answer else [])
        assert len(cut) < 0.5 * len(blank_first)
        assert bounds.least(cut) > 100
        assert cut.endswith("<|im_end|>") == answer
    assert bounds.shorten(short, tokens=10, ends=["<|im_end|>"]) is short  # counting it costs little
    assert bounds.shorten(" " * 10**6, tokens=10, ends=["<|im_end|>"]) == " " * 10**6  # may be swallowed by a token
