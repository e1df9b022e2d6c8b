"""Small tokenizers that mark the beginning of a text with "▁", of each kind that is in use, and chat templates."""

import json
from pathlib import Path
from typing import Any

from rlhf_core.data.chat import ChatTemplate

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

FORGETFUL = (
    "{% for m in messages %}{{ '...' if m['role'] == 'assistant' and not loop.last else m['content'] }}"
    "{{ eos_token }}{% endfor %}"
)
"""Rewrites every answer but the last."""

KINDS = ("bpe-prepend", "bpe-always", "bpe-first", "unigram-always")
"""`prepend`: a normalizer does it, as in Llama 2 and TinyLlama; `always` and `first`: the pre-tokenizer, before each text
between special tokens (legacy), or before the whole."""


def with_template(chat: ChatTemplate, source: str) -> ChatTemplate:
    """Return the tokenizer of `chat`, which comes from a folder, with another template."""
    tokenizer = ChatTemplate.load(Path(chat.tokenizer.name_or_path)).tokenizer
    tokenizer.chat_template = source
    return ChatTemplate(tokenizer)


def tokenizer_of(kind: str, template: str) -> Any:
    """Return a transformers tokenizer with byte fallback."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, _, mark = kind.partition("-")
    tokenizer = Tokenizer(_model(model))
    if mark == "prepend":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=mark, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _model(kind: str) -> Any:
    """Return a model of the pieces that BPE learns from `TEXTS`, and of all bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    letters = [chr(code) for code in range(33, 127)]
    learner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=160, initial_alphabet=letters))
    learnt = json.loads(learner.to_str())["model"]
    learnt_pieces = sorted(learnt["vocab"], key=learnt["vocab"].__getitem__)
    if kind == "bpe":
        pieces = {piece: at for at, piece in enumerate([*SPECIAL, *BYTES, *learnt_pieces])}
        return models.BPE(pieces, [tuple(merge) for merge in learnt["merges"]], unk_token="<unk>", byte_fallback=True)
    # Longer pieces are likelier than what they are made of.
    scored = [(token, 0.0) for token in (*SPECIAL, *BYTES)] + [(one, -8.0 + len(one) * 0.1) for one in learnt_pieces]
    return models.Unigram(scored, unk_id=0, byte_fallback=True)
