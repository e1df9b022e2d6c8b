"""A tiny Llama with its tokenizer, made once by the code under test, tiny models of other families, and how all are loaded."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama, train_tokenizer
from rlhf_core.models.loading import load_model
from tests.support.tolerances import of_model

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


IDS = torch.tensor([[1, 20, 30, 40, 4, 2, 50]])


def loaded(
    folder: Path,
    head: Literal["lm", "score", "value"] = "lm",
    *,
    lora: LoraConfig | None = None,
    seed: int = 5,
    dtype: str = "float32",
    attention: str = "sdpa",
    checkpointing: bool = False,
) -> Any:
    """Return the model in `folder` on the CPU."""
    spec = ModelSpec(str(folder), head, lora, seed)
    return load_model(spec, dtype=dtype, attention=attention, gradient_checkpointing=checkpointing, device="cpu")


def sharpened(model: Any, by: float = 6.0) -> Any:
    """Scale the weights so that the distributions are far from uniform and attention matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(by)
    return model.eval()


def assert_near(got: Sequence[Tensor], want: Sequence[Tensor], shape: InitModel) -> None:
    """Compare to the rounding of float32; a neighbor that is seen, or one position off, changes these by 0.1 and more."""
    atol = of_model(shape) * max(1.0, *(float(one.detach().abs().max()) for one in want))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=atol)


def make_tiny_llama(folder: Path, seed: int = 7) -> Path:
    train_tokenizer(TEXTS, vocab_size=320, folder=folder)
    initialize_llama(TINY, folder, seed=seed)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """A policy folder; 0.1 s. Weights are scaled up where a test needs distributions that are not flat."""
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def made(tiny_llama: Path, tmp_path) -> Any:
    """Return a function that writes a model of a family with the tokenizer of `tiny_llama`, and returns its folder."""

    def make(family: str, **options: Any) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(5)
        model = sharpened(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | options)))
        folder = tmp_path / family
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_llama / name, folder / name)
        return folder

    return make
