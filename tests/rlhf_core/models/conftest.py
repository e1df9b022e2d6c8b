"""A tiny Llama with its tokenizer, made once by the code under test, and tiny models of other families."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import InitModel
from rlhf_core.models.initialise import initialise_llama, train_tokenizer

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 4,
}
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


@pytest.fixture
def made(tiny_llama: Path, tmp_path: Path) -> Any:
    """Return a function that writes a model of a family with the tokenizer of `tiny_llama`, and returns its folder."""

    def make(family: str, **options: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    parameter.mul_(6.0)  # sharp enough for attention to matter
        folder = tmp_path / family
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_llama / name, folder / name)
        return folder

    return make
