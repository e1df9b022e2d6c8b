"""A policy with random weights, so that nothing is downloaded and every answer has its maximum length."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.models import InitModel
from rlhf_core.models.initialize import initialize_llama, train_tokenizer

VOCABULARY = 512
HEAD_SIZE = 64


def make_policy(folder: Path, hidden: int, layers: int, *, positions: int, vocabulary: int = VOCABULARY) -> None:
    """Write a Llama whose answers always reach their limit; its tokenizer has `VOCABULARY` tokens."""
    heads = hidden // HEAD_SIZE
    shape = InitModel(
        vocab_size=vocabulary, hidden_size=hidden, layers=layers, heads=heads, kv_heads=heads,
        intermediate_size=hidden * 8 // 3, max_positions=positions,
    )  # fmt: skip
    train_tokenizer(["numbers 0 1 2 3 4 5 6 7 8 9 and words"] * 5, vocab_size=VOCABULARY, folder=folder)
    initialize_llama(shape, folder, seed=17)
