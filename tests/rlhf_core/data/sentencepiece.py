"""Small tokenizers that mark the beginning of a text with "▁", of each kind that is in use, and templates of their models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
TEXTS = ["Hello Maria, how are you?", "I am sorry. Thank you for writing.", "What is 12 + 30?", "12 + 30 = 42"] * 5

LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{{ 'USER: ' + m['content'] + ' ' if m['role'] == 'user' else 'ASSISTANT: ' + m['content'] + "
    "eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
"""Its generation prompt ends with a space, which belongs to the first token of an answer in the whole text."""

KINDS = ("bpe-prepend", "bpe-always", "bpe-first", "unigram-always")
"""`prepend`: a normalizer does it, as in Llama 2 and TinyLlama; `always` and `first`: the pre-tokenizer, before each text
between special tokens (legacy), or before the whole."""


def tokenizer_of(kind: str, template: str) -> Any:
    """Return a transformers tokenizer with byte fallback."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, _, mark = kind.partition("-")
    tokenizer = Tokenizer(_bpe() if model == "bpe" else _unigram())
    if mark == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=mark, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert models is not None
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _bpe() -> Any:
    from tokenizers import models, trainers

    vocabulary, merges = _learnt(models.BPE(), trainers.BpeTrainer(vocab_size=160, initial_alphabet=_letters()))
    pieces = [*SPECIAL, *BYTES, *sorted(vocabulary, key=vocabulary.__getitem__)]
    return models.BPE({piece: at for at, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)


def _unigram() -> Any:
    from tokenizers import models

    vocabulary, _ = _learnt_bpe()
    pieces = [(token, 0.0) for token in (*SPECIAL, *BYTES)]
    # Longer pieces are likelier than what they are made of.
    pieces += [(token, -8.0 + len(token) * 0.1) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
    return models.Unigram(pieces, unk_id=0, byte_fallback=True)


def _learnt_bpe() -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers import models, trainers

    return _learnt(models.BPE(), trainers.BpeTrainer(vocab_size=160, initial_alphabet=_letters()))


def _learnt(model: Any, trainer: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    import json

    from tokenizers import Tokenizer, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    return learnt["vocab"], [tuple(merge) for merge in learnt["merges"]]


def _letters() -> Sequence[str]:
    return [chr(code) for code in range(33, 127)]
