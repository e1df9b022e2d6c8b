"""Adapters start as nothing, merge exactly, and load in peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.engines import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.export import export_model
from rlhf_core.models.loading import load_model
from rlhf_core.models.lora import has_lora, merged_state_dict, save_adapter

LORA = LoraConfig(rank=4, alpha=8.0)
IDS = torch.tensor([[1, 20, 30, 40, 4, 2, 50]])


def loaded(folder: Path, lora: LoraConfig | None, *, dtype: str = "float32", seed: int = 5) -> Any:
    spec = ModelSpec(str(folder), "lm", lora, seed)
    return load_model(spec, dtype=dtype, attention="sdpa", gradient_checkpointing=False, device="cpu")


def trained(folder: Path, *, dtype: str = "float32") -> Any:
    """A model whose adapters are no longer zero."""
    model = loaded(folder, LORA, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def test_fresh_adapters_change_nothing_and_alone_are_trainable(tiny_llama: Path) -> None:
    plain, adapted = loaded(tiny_llama, None), loaded(tiny_llama, LORA)
    assert torch.equal(logits(plain), logits(adapted))
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    # 2 layers x 7 modules x (A, B)
    assert len(trainable) == 28 and all(".lora_" in name for name in trainable)
    assert has_lora(adapted) and not has_lora(plain)


def test_adapters_depend_on_their_seed_only(tiny_llama: Path) -> None:
    def a_weights(seed: int) -> list[torch.Tensor]:
        return [p for name, p in loaded(tiny_llama, LORA, seed=seed).named_parameters() if ".lora_A." in name]

    torch.manual_seed(1)
    one = a_weights(5)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    two = a_weights(5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert not torch.equal(one[0], a_weights(6)[0])


def test_a_plain_model_gives_its_own_weights_without_the_tied_head(tiny_llama: Path) -> None:
    from safetensors.torch import load_file

    state = merged_state_dict(loaded(tiny_llama, None))
    stored = load_file(tiny_llama / "model.safetensors")
    assert set(state) == set(stored) and "lm_head.weight" not in state
    assert all(torch.equal(state[name], stored[name]) for name in stored)


def test_the_merge_is_w_plus_scaled_b_a(tiny_llama: Path) -> None:
    model = trained(tiny_llama)
    layer = model.model.layers[1].mlp.down_proj
    wanted = layer.base_layer.weight + (8.0 / 4) * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    merged = merged_state_dict(model)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(merged, wanted.detach(), rtol=0, atol=1e-7)


def test_merging_leaves_the_live_model_alone(tiny_llama: Path) -> None:
    model = trained(tiny_llama)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged_state_dict(model)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_merged_export_equals_the_adapted_model(tiny_llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = trained(tiny_llama)
    assert (logits(model) - logits(loaded(tiny_llama, None))).abs().max() > 1e-2
    export_model(model, tmp_path, tokenizer_from=tiny_llama)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(exported), logits(model), rtol=0, atol=1e-5)


def test_bfloat16_weights_are_merged_in_fp32_and_rounded_once(tiny_llama: Path) -> None:
    model = trained(tiny_llama, dtype="bfloat16")
    layer = model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    wanted = (layer.base_layer.weight.float() + 2.0 * b @ a).to(torch.bfloat16)
    assert torch.equal(merged_state_dict(model)["model.layers.0.self_attn.q_proj.weight"], wanted)


def test_a_saved_adapter_loads_in_peft_on_the_base(tiny_llama: Path, tmp_path: Path) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    model = trained(tiny_llama)
    save_adapter(model, tmp_path)
    assert str(tiny_llama) not in (tmp_path / "adapter_config.json").read_text()
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    again = peft.PeftModel.from_pretrained(base, str(tmp_path))
    assert torch.equal(logits(again), logits(model))


def test_a_saved_adapter_has_the_same_bytes_each_time(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_adapter(trained(tiny_llama), tmp_path / name)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_adapters_learn_through_checkpointed_activations(tiny_llama: Path) -> None:
    spec = ModelSpec(str(tiny_llama), "lm", LORA, 5)
    model: Any = load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=True, device="cpu")
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.grad.abs().sum() > 0
    assert model.model.embed_tokens.weight.grad is None


def test_fused_experts_get_their_checkpoint_names_back(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = Qwen3MoeConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(shape).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in stored
    state = merged_state_dict(loaded(tmp_path, None))
    assert set(state) == set(stored)
    assert all(torch.equal(state[name], stored[name]) for name in stored)


def test_targets_that_are_not_in_the_model_are_refused_with_the_choices(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora.target_modules = \('c_attn',\).*q_proj"):
        loaded(tiny_llama, LoraConfig(target_modules=("c_attn",)))


@pytest.mark.parametrize(("variant", "scaling"), [("rslora", 8.0 / 4**0.5), ("dora", 8.0 / 4)])
def test_variants_start_as_nothing_and_merge_to_what_the_adapted_model_computes(
    tiny_llama: Path, variant: Any, scaling: float
) -> None:
    plain = loaded(tiny_llama, None)
    model = loaded(tiny_llama, LORA.model_copy(update={"variant": variant}))
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=1e-6)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name or "magnitude" in name:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    adapted = logits(model)
    assert (adapted - logits(plain)).abs().max() > 1e-3
    layer = model.model.layers[1].mlp.down_proj
    assert layer.scaling["default"] == pytest.approx(scaling)
    merged = loaded(tiny_llama, None)
    merged.load_state_dict(merged_state_dict(model), strict=False)  # the tied head is left out
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-5)
