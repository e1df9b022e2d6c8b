"""Exports load in plain transformers and repeat byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.export import export_model
from rlhf_core.models.loading import load_model, load_tokenizer

IDS = torch.tensor([[1, 20, 30, 40, 4, 2, 50]])


def loaded(folder: Path, head: Any = "lm", lora: LoraConfig | None = None, dtype: str = "float32") -> Any:
    spec = ModelSpec(str(folder), head, lora, 5)
    return load_model(spec, dtype=dtype, attention="sdpa", gradient_checkpointing=False, device="cpu")


def test_a_policy_export_repeats_the_folder_it_came_from(tiny_llama: Path, tmp_path: Path) -> None:
    export_model(loaded(tiny_llama), tmp_path, tokenizer_from=tiny_llama)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (tiny_llama / name).read_bytes(), name
    assert str(tiny_llama) not in (tmp_path / "config.json").read_text()


def test_a_policy_export_carries_template_and_stop_tokens(tiny_llama: Path, tmp_path: Path) -> None:
    export_model(loaded(tiny_llama), tmp_path, tokenizer_from=tiny_llama)
    text = load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert text == "<|user|>a<|end|>"
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (4, 0)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_an_export_in_bfloat16_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    export_model(loaded(tiny_llama, dtype="bfloat16"), tmp_path, tokenizer_from=tiny_llama)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert loaded(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_an_exported_reward_model_scores_the_same_in_plain_transformers(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = loaded(tiny_llama, "score")
    export_model(model, tmp_path, tokenizer_from=tiny_llama)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert plain.config.num_labels == 1 and plain.score.bias is None
    with torch.no_grad():
        assert torch.equal(plain(input_ids=IDS).logits, model(input_ids=IDS).logits)
        # Padded on the right by hand: plain transformers finds the last token from the padding id.
        padded = torch.tensor([[1, 20, 30, 4, 0, 0, 0]])
        torch.testing.assert_close(
            plain(input_ids=padded).logits, model(input_ids=padded[:, :4]).logits, rtol=0, atol=1e-6
        )


def test_a_model_with_lora_also_leaves_its_adapters(tiny_llama: Path, tmp_path: Path) -> None:
    export_model(loaded(tiny_llama, lora=LoraConfig(rank=2)), tmp_path, tokenizer_from=tiny_llama)
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    # B is still zero, so the merged weights are the base's, byte for byte.
    assert (tmp_path / "model.safetensors").read_bytes() == (tiny_llama / "model.safetensors").read_bytes()


def test_an_export_without_a_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        export_model(loaded(tiny_llama), tmp_path / "out", tokenizer_from=tmp_path / "empty")
