"""A tiny Llama with its tokenizer, made once by the code under test."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.engines import InitModel
from rlhf_core.models.initialise import initialise_llama, train_tokenizer

TEXTS = [
    "What is 12 + 30? It is 42.",
    "Name a colour. Blue is a colour.",
    "Say hello to the reader. Hello, reader!",
] * 5
TINY = InitModel(vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=128, max_positions=64)


def make_tiny_llama(folder: Path) -> Path:
    train_tokenizer(TEXTS, vocab_size=320, folder=folder)
    initialise_llama(TINY, folder, seed=7)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder; 0.1 s. Weights are scaled up where a test needs distributions that are not flat."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
