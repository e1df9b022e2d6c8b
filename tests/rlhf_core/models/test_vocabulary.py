from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.engines import InitModel
from rlhf_core.errors import ConfigError
from rlhf_core.models.initialise import initialise_llama, train_tokenizer
from rlhf_core.models.loading import shared_vocabulary


def policy(folder: Path, *, text: str, width: int = 32, vocabulary: int = 320) -> Path:
    train_tokenizer([text] * 5, vocab_size=vocabulary, folder=folder)
    shape = InitModel(
        vocab_size=vocabulary, hidden_size=width, layers=1, heads=2, kv_heads=2, intermediate_size=64, max_positions=64
    )
    initialise_llama(shape, folder, seed=7)
    return folder


def test_models_of_any_size_share_a_vocabulary_if_their_tokens_are_the_same(tmp_path: Path) -> None:
    text = "What is 12 + 30? It is 42. Say hello to the reader. Name a colour; blue is a colour."
    small = policy(tmp_path / "small", text=text)
    assert shared_vocabulary(small, policy(tmp_path / "large", text=text, width=64)) == 320
    with pytest.raises(ConfigError, match=r"teacher = .*: its vocabulary has 330 tokens, the student's has 320; use"):
        shared_vocabulary(small, policy(tmp_path / "wide", text=text, vocabulary=330))
    with pytest.raises(ConfigError, match=r"tokens have other ids than in the student's tokenizer, for example '.+'"):
        shared_vocabulary(small, policy(tmp_path / "other", text="Entirely different words, of which there are many."))
