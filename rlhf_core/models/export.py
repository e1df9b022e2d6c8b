"""Export trained models in Hugging Face layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import save_torch_state_dict
from torch import nn

from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.forward import ValueModel
from rlhf_core.models.lora import has_lora, merged_state_dict, save_adapter

SHARD_SIZE = "5GB"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Files that a tokenizer may consist of (most have the first two), copied byte for byte so that its digest stays."""


def export_model(model: nn.Module, folder: Path, *, tokenizer_from: Path) -> None:
    """Write `model` in Hugging Face layout (safetensors, LoRA merged) with the tokenizer of `tokenizer_from`.

    Adapters are also written separately to `adapter/`. The same weights give the same bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, ValueModel):
        model.save(folder)
    else:
        _save(model, folder)
    if has_lora(model):
        save_adapter(model, folder / "adapter")
    if tokenizer_from.resolve() != folder.resolve():
        _copy_tokenizer(tokenizer_from, folder)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    if not (source / "tokenizer_config.json").is_file():
        raise ConfigError(
            explain(
                "tokenizer", str(source), "has no tokenizer_config.json", "give the folder that the model came from"
            )
        )
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _save(model: nn.Module, folder: Path) -> None:
    any_model: Any = model
    any_model.config.architectures = [type(model).__name__]
    any_model.config.dtype = str(any_model.dtype).removeprefix("torch.")
    any_model.config.save_pretrained(folder)
    if any_model.can_generate():
        any_model.generation_config.save_pretrained(folder)
    # The experts of one fused parameter share its storage, of which huggingface_hub would write a part only.
    state = {
        name: tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
        for name, tensor in merged_state_dict(model).items()
    }
    save_torch_state_dict(state, folder, max_shard_size=SHARD_SIZE, metadata={"format": "pt"})
