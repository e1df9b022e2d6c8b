"""Weights of 4 bits under adapters, where bitsandbytes is installed; elsewhere they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models import lora as quantised
from rlhf_core.models.export import export_model
from rlhf_core.models.loading import load_model
from rlhf_core.models.lora import merged_state_dict

IDS = torch.tensor([[1, 20, 30, 40, 4, 2, 50]])


def loaded(folder: Path, lora: LoraConfig | None, **options: Any) -> Any:
    settings = {"dtype": "float32", "attention": "sdpa", "gradient_checkpointing": False, "device": "cpu"}
    return load_model(ModelSpec(str(folder), "lm", lora, 5), **settings | options)


def loss(model: Any) -> torch.Tensor:
    made: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return made


def test_without_bitsandbytes_it_is_refused_before_anything_is_loaded(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"lora.quantise = 'nf4': needs bitsandbytes.*install bitsandbytes"):
        loaded(tiny_llama, LoraConfig(quantise="nf4"))


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_adapters_are_trained_over_4_bits_and_merged_into_whole_weights(
    tiny_llama: Path, tmp_path: Path, variant: Any
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = loaded(tiny_llama, LoraConfig(rank=2, variant=variant, quantise="nf4"), gradient_checkpointing=True)
    small = model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert (small.dtype, small.numel()) == (torch.uint8, 64 * 64 // 2)
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} <= {"default"}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    before = loss(model)
    for _ in range(5):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = loss(model)
    assert float(after.detach()) < float(before.detach()) - 0.05

    export_model(model, tmp_path, tokenizer_from=tiny_llama)
    plain = loaded(tmp_path, None)
    torch.testing.assert_close(plain(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    assert merged_state_dict(plain).keys() == merged_state_dict(loaded(tiny_llama, None)).keys()


def test_only_the_adapted_layers_are_rounded_and_by_little(tiny_llama: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    state = merged_state_dict(loaded(tiny_llama, LoraConfig(quantise="nf4", target_modules=("q_proj",))))
    for name, whole in merged_state_dict(loaded(tiny_llama, None)).items():
        if "q_proj" in name:
            assert 0.01 < float((state[name] - whole).norm() / whole.norm()) < 0.15, name
        else:
            assert torch.equal(state[name], whole), name
