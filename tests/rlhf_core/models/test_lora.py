"""Adapters start as nothing, merge exactly, and load in peft; weights of 4 bits under them, and digests of weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from rlhf_core.config.models import LoraConfig
from rlhf_core.errors import ConfigError, TrainingError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models import lora as quantised
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import sequence_scores, token_values
from rlhf_core.models.loading import export_model
from rlhf_core.models.lora import WeightStream, has_lora, save_adapter, weights_digest, without_adapters
from rlhf_core.models.parameter_sources import OpenFiles
from rlhf_core.models.parts import open_parts
from rlhf_core.types import TokenSample
from tests.rlhf_core.models.conftest import IDS, loaded

LORA = LoraConfig(rank=4, alpha=8.0)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    **MOE,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen3_moe": MOE,
    "deepseek_v3": DEEPSEEK,
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48},
    "jamba": {"num_experts": 4, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
}


def merged_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in WeightStream(model)}


def trained(folder: Path, lora: LoraConfig = LORA, **options: Any) -> Any:
    """A model whose adapters are no longer zero."""
    model = loaded(folder, lora=lora, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name and parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits.float()


def assert_stream(model: Any) -> None:
    """Raise AssertionError unless `metadata` and the digest of a stream are those of the weights that it yields."""
    stream, state = WeightStream(model), merged_state_dict(model)
    assert list(stream.metadata) == list(state)
    for name, weight in state.items():
        assert (stream.metadata[name].dtype, stream.metadata[name].shape) == (weight.dtype, weight.shape), name
        assert torch.equal(stream.read(name), weight), name
    assert stream.digest() == weights_digest(state)


def test_fresh_adapters_change_nothing_and_alone_are_trainable(tiny_llama):
    plain, adapted = loaded(tiny_llama), loaded(tiny_llama, lora=LORA)
    assert torch.equal(logits(plain), logits(adapted))
    trainable = {name for name, p in adapted.named_parameters() if p.requires_grad}
    # 2 layers x 7 modules x (A, B)
    assert len(trainable) == 28 and all(".lora_" in name for name in trainable)
    assert has_lora(adapted) and not has_lora(plain)


def test_adapters_depend_on_their_seed_only(tiny_llama):
    def a_weights(seed: int) -> list[torch.Tensor]:
        return [p for name, p in loaded(tiny_llama, lora=LORA, seed=seed).named_parameters() if ".lora_A." in name]

    torch.manual_seed(1)
    one = a_weights(5)
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    two = a_weights(5)
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))
    assert not torch.equal(one[0], a_weights(6)[0])


def test_a_plain_model_gives_its_own_weights_without_the_tied_head(tiny_llama):
    from safetensors.torch import load_file

    state = merged_state_dict(loaded(tiny_llama))
    stored = load_file(tiny_llama / "model.safetensors")
    assert set(state) == set(stored) and "lm_head.weight" not in state
    assert all(torch.equal(state[name], stored[name]) for name in stored)


def test_merging_leaves_the_live_model_alone(tiny_llama):
    model = trained(tiny_llama)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged_state_dict(model)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bfloat16_weights_are_merged_in_fp32_and_rounded_once(tiny_llama):
    model = trained(tiny_llama, dtype="bfloat16")
    layer = model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    wanted = (layer.base_layer.weight.float() + 2.0 * b @ a).to(torch.bfloat16)
    assert torch.equal(merged_state_dict(model)["model.layers.0.self_attn.q_proj.weight"], wanted)


def test_adapters_alone_are_those_of_the_file_but_for_the_idle_ones(tiny_llama, tmp_path):
    model = trained(tiny_llama)
    model.model.layers[1].mlp.up_proj.lora_A.requires_grad_(False)
    save_adapter(model, tmp_path)
    saved, stream = load_file(tmp_path / "adapter_model.safetensors"), WeightStream(model, adapters_alone=True)
    sent = dict(stream)
    assert saved.keys() - sent.keys() == {"base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in sent.items())
    assert stream.digest() == weights_digest(sent)


def test_a_saved_adapter_has_the_same_bytes_each_time(tiny_llama, tmp_path):
    for name in ("one", "two"):
        save_adapter(trained(tiny_llama), tmp_path / name)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_adapters_learn_through_checkpointed_activations(tiny_llama):
    model = loaded(tiny_llama, lora=LORA, checkpointing=True)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.grad.abs().sum() > 0
    assert model.model.embed_tokens.weight.grad is None


def test_fused_experts_get_their_checkpoint_names_back(tiny_llama, tmp_path):
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
    state = merged_state_dict(loaded(tmp_path))
    assert set(state) == set(stored)
    assert all(torch.equal(state[name], stored[name]) for name in stored)


@pytest.mark.parametrize("variant", ["lora", "dora"])
@pytest.mark.parametrize(
    ("family", "adapted", "frozen"),
    [
        ("gpt2", {"c_attn", "c_proj", "c_fc"}, set()),  # Conv1D, whose weights are [in, out]
        ("phi3", {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, set()),
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj", "o_proj"}, set()),  # experts that are no modules
        # peft would read the names of the shared experts as those of the fused ones.
        ("deepseek_v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}, set()),
        # A router that is a Linear, and returns more than a product.
        ("llama4_text", {*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj")}, set()),
        ("jamba", {*("q_proj", "x_proj", "in_proj", "out_proj", "router")}, {"dt_proj"}),  # its weight alone is used
    ],
)
def test_all_that_is_adapted_in_a_family_is_in_its_export(family, adapted, frozen, variant, made, tmp_path):
    folder = made(family, **FAMILIES.get(family, {}))
    model = trained(folder, LoraConfig(rank=2, variant=variant, target_modules="all-linear"))
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A")]
    assert adapted <= {name.rsplit(".", 1)[-1] for name, _ in layers}
    assert "lm_head" not in {name for name, _ in layers}
    still = {name.rsplit(".", 1)[-1] for name, one in layers if not any(p.requires_grad for p in one.parameters())}
    assert still == frozen
    assert_stream(model)
    before, plain = logits(model), logits(loaded(folder))
    assert (before - plain).abs().max() > 2e-2
    export_model(model, tmp_path / "out", tokenizer_from=folder)
    # The sixfold weights magnify roundings: 2.3e-4 was seen with the kernels of ATEN_CPU_CAPABILITY=default.
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), before, rtol=0, atol=5e-4)


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("family", "stacks"),
    [
        ("qwen3_moe", EXPERTS),
        ("mixtral", EXPERTS),
        ("gpt_oss", EXPERTS),  # its stacks are [expert, in, out]
        ("deepseek_v3", ("1.mlp.experts.down_proj",)),
        ("llama4_text", EXPERTS),
    ],
)
def test_adapters_of_experts_alone_learn_and_are_in_the_export(family, stacks, made, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    folder, attention = made(family, **FAMILIES.get(family, {})), "eager" if family == "gpt_oss" else "sdpa"
    lora = LoraConfig(rank=2, target_modules=("o_proj",), target_parameters=stacks)
    plain, fresh = loaded(folder, attention=attention), loaded(folder, lora=lora, attention=attention)
    torch.testing.assert_close(logits(fresh), logits(plain), rtol=0, atol=0)
    again = loaded(folder, lora=lora, attention=attention)
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), again.parameters(), strict=True))

    model = trained(folder, lora, attention=attention, checkpointing=True)
    model(input_ids=IDS, labels=IDS).loss.backward()
    learning = {name for name, one in model.named_parameters() if one.grad is not None and one.grad.abs().sum() > 0}
    assert learning == {name for name, one in model.named_parameters() if ".lora_" in name}
    # A and B, in two layers: of o_proj and of two stacks, or of one stack in one of them
    assert len(learning) == 4 + (8 if stacks == EXPERTS else 2)
    with without_adapters(model):
        assert torch.equal(logits(model), logits(plain))
    adapted = logits(model)
    assert (adapted - logits(plain)).abs().max() > 2e-2
    assert_stream(model)
    export_model(model, tmp_path / "out", tokenizer_from=folder)
    # As above: the sixfold weights magnify roundings.
    exported = loaded(tmp_path / "out", attention=attention)
    torch.testing.assert_close(logits(exported), adapted, rtol=0, atol=5e-4)
    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention)
    in_peft = peft.PeftModel.from_pretrained(base, str(tmp_path / "out/adapter"))
    assert torch.equal(logits(in_peft), adapted)


@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("llama", "experts.down_proj", r"no stacks of experts \['experts.down_proj'\]; remove it"),
        ("qwen3_moe", "experts.up_proj", r"'experts.up_proj'\]; use some of \['experts.down_proj', 'experts.gate_up"),
        ("gpt_oss", "gate_up_proj_bias", "no stacks of experts"),
        ("jamba", "conv1d.weight", "no stacks of experts"),
    ],
)
def test_a_stack_that_the_model_does_not_have_is_refused(family, target, message, made):
    folder = made(family, **FAMILIES.get(family, {}))
    with pytest.raises(ConfigError, match=rf"lora.target_parameters = \('{target}',\): .*{message}"):
        loaded(
            folder,
            lora=LoraConfig(target_modules="all-linear", target_parameters=(target,)),
            attention="eager" if family == "gpt_oss" else "sdpa",
        )


@pytest.mark.parametrize("other", [{"variant": "dora"}, {"quantize": "nf4"}])
def test_adapters_of_experts_have_one_form(other):
    [(name, value)] = other.items()
    with pytest.raises(ValidationError, match=f"{name} = '{value}': is not possible for adapters of experts"):
        LoraConfig(target_parameters=EXPERTS, **other)


@pytest.mark.parametrize(
    ("family", "tied", "lora", "message"),
    [
        ("llama", False, {"target_modules": ("c_attn",)}, r"'c_attn',\): the model has no linear modules.*'q_proj'"),
        (
            "llama",
            False,
            {"target_modules": ("q_proj", "qkv_proj")},
            r"no linear modules \['qkv_proj'\]; use \"all-linear\"",
        ),
        ("llama", False, {"target_modules": ("q_proj", "embed_tokens")}, r"no linear modules \['embed_tokens'\]"),
        ("phi3", False, {}, r"no linear modules \['gate_proj', 'k_proj', .*use \"all-linear\""),
        (
            "llama",
            True,
            {"target_modules": ("q_proj", "lm_head")},
            "lm_head shares its weight .*embed_tokens.*leave it out",
        ),
        ("qwen3_moe", False, {"target_modules": ("q_proj", "down_proj")}, r"no linear modules \['down_proj'\]"),
        ("deepseek_v3", False, {"target_modules": ("shared_experts.down_proj",)}, "parameter of fused experts"),
        (
            "jamba",
            False,
            {"target_modules": ("q_proj", "dt_proj")},
            r"does not call \['model.layers.\*.mamba.dt_proj'\]",
        ),
        ("score", False, {"target_modules": ("q_proj", "score")}, r"no linear modules \['score'\]"),
        ("gpt2", False, {"target_modules": "all-linear", "quantize": "nf4"}, "Conv1D layers, which have no 4-bit form"),
    ],
)
def test_adapters_that_would_not_be_trained_or_merged_are_refused(family, tied, lora, message, made, monkeypatch):
    monkeypatch.setattr("rlhf_core.models.loading.check_quantizer", lambda: None)
    with pytest.raises(ConfigError, match=message):
        head = "score" if family == "score" else "lm"
        folder = made("llama" if head == "score" else family, tie_word_embeddings=tied, **FAMILIES.get(family, {}))
        loaded(folder, head, lora=LoraConfig(rank=2, **lora))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "jamba"])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_files_written_when_they_are_full_are_those_of_all_weights_at_once(family, size, made, tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.models.loading.SHARD_SIZE", size)
    folder = made(family, **FAMILIES.get(family, {}))
    model = loaded(folder)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-00001-of-00999.safetensors").touch()  # of an export in the same place
    state = {name: weight.clone() for name, weight in merged_state_dict(model).items()}  # experts share a storage
    save_torch_state_dict(state, tmp_path / "one", max_shard_size=size, metadata={"format": "pt"})
    export_model(model, tmp_path / "other", tokenizer_from=folder)
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "other").glob("model*"))
    assert (len(files) > 3) == (size == "20KB")
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in files)


@pytest.mark.parametrize("head", ["score", "value"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "cohere", "qwen3_moe", "jamba"])
def test_adapters_below_a_scalar_head_leave_it_whole_and_are_merged_on_export(family, head, made, tmp_path):
    folder = made(family, **FAMILIES.get(family, {}))
    model = trained(folder, LoraConfig(rank=2, target_modules="all-linear"), head=head)
    whole = [name for name, one in model.named_parameters() if one.requires_grad and ".lora_" not in name]
    assert whole == ["score.weight" if type(model).__name__ != "ValueModel" else "value_head.weight"]
    assert_stream(model)
    batch = collate([TokenSample((1, 20, 30, 40), (0, 1, 1, 1)), TokenSample((7, 8, 9, 9), (0, 1, 1, 1))], pad_id=0)
    compute = sequence_scores if head == "score" else token_values
    with torch.no_grad():
        wanted = compute(model, batch)
        assert (wanted - compute(loaded(folder, head), batch)).abs().max() > 1e-3
        export_model(model, tmp_path / "out", tokenizer_from=folder)
        found = compute(loaded(tmp_path / "out", head, seed=9), batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-4)
    assert not (tmp_path / "out/adapter").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head", ["lm", "score", "value"])
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "cohere", "phi3", "gemma3_text", "qwen2", "qwen3_moe", "deepseek_v3", "jamba"]
)
def test_a_model_in_parts_is_the_one_that_is_loaded_whole(family, head, dtype, made):
    folder = made(family, **FAMILIES.get(family, {}))
    whole = loaded(folder, head, dtype=dtype)
    parts = open_parts(ModelSpec(str(folder), head, None, 5), dtype=dtype, attention="sdpa")
    assert parts is not None
    weights, found = dict(whole.named_parameters()), dict(parts.module.named_parameters())
    assert found.keys() == weights.keys() and parts.sources.keys() == {n for n, one in found.items() if one.is_meta}
    for name, weight in weights.items():
        assert (found[name].shape, found[name].dtype) == (weight.shape, weight.dtype), name
        size = weight.numel()
        read = [found[name].detach().flatten()]
        if name in parts.sources:  # as three ranks do
            with OpenFiles() as files:
                read = [parts.sources[name].read(files, size * rank // 3, size * (rank + 1) // 3) for rank in range(3)]
        assert torch.equal(torch.cat(read).to(weight.dtype), weight.detach().flatten()), name
    buffers = dict(parts.module.named_buffers())
    assert [(n, b.dtype, b.tolist()) for n, b in whole.named_buffers()] == [
        (n, buffers[n].dtype, buffers[n].tolist()) for n, _ in whole.named_buffers()
    ]
    assert parts.module.config.to_dict() == whole.config.to_dict()
    assert [(type(m), m.training) for m in parts.module.modules()] == [(type(m), m.training) for m in whole.modules()]


@pytest.mark.parametrize(
    ("family", "options", "lora", "reason"),
    [
        (
            "llama",
            {"tie_word_embeddings": False},
            "tied",
            "do not have all weights of a LlamaForCausalLM, or transformers does more",
        )
    ],
)
def test_the_log_has_the_reason_why_a_model_is_loaded_whole(family, options, lora, reason, made, caplog):
    folder = made(family, **options)
    if lora == "tied":  # the configuration alone
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
        lora = None
    with caplog.at_level("INFO"):
        assert open_parts(ModelSpec(str(folder), "lm", lora, 5), dtype="float32", attention="sdpa") is None
    assert f"{folder} is loaded whole by every rank" in caplog.text and reason in caplog.text


def test_the_end_of_a_full_name_selects_a_module(tiny_llama):
    model = loaded(tiny_llama, lora=LoraConfig(rank=2, target_modules=("1.mlp.down_proj", "k_proj")))
    adapted = [name.removeprefix("model.layers.") for name, one in model.named_modules() if hasattr(one, "lora_A")]
    assert adapted == ["0.self_attn.k_proj", "1.self_attn.k_proj", "1.mlp.down_proj"]


def test_a_row_of_zeros_has_no_direction_for_dora(made):
    from safetensors.torch import load_file

    folder = made("llama", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][7] = 0.0  # as in a vocabulary that is padded
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lora.variant = 'dora': lm_head has a row of zeros"):
        loaded(folder, lora=LoraConfig(target_modules=("lm_head",), variant="dora"))


def test_a_merge_that_would_lose_an_adapter_is_an_error(made):
    model = trained(made("llama", tie_word_embeddings=False), LoraConfig(rank=2, target_modules=("q_proj", "lm_head")))
    assert not torch.equal(merged_state_dict(model)["lm_head.weight"], model.lm_head.base_layer.weight)
    model.lm_head.base_layer.weight = nn.Parameter(model.model.embed_tokens.weight)
    model.model.embed_tokens.weight = model.lm_head.base_layer.weight  # tied after the adapters were made
    with pytest.raises(TrainingError, match=r"lora = 1: what adapters have learned would be missing .*lm_head"):
        merged_state_dict(model)


@pytest.mark.parametrize(("variant", "scaling"), [("rslora", 8.0 / 4**0.5), ("dora", 8.0 / 4)])
def test_variants_start_as_nothing_and_merge_to_what_the_adapted_model_computes(tiny_llama, variant, scaling):
    plain = loaded(tiny_llama)
    model = loaded(tiny_llama, lora=LORA.model_copy(update={"variant": variant}))
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
    merged = loaded(tiny_llama)
    merged.load_state_dict(merged_state_dict(model), strict=False)  # the tied head is left out
    torch.testing.assert_close(logits(merged), adapted, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- weights of 4 bits


def loss(model: Any) -> torch.Tensor:
    made: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return made


def test_without_bitsandbytes_it_is_refused_before_anything_is_loaded(tiny_llama, monkeypatch):
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"lora.quantize = 'nf4': needs bitsandbytes.*pip install 'rlhf-lifecycle.kernels.'"
    ):
        loaded(tiny_llama, lora=LoraConfig(quantize="nf4"))


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_adapters_are_trained_over_4_bits_and_merged_into_whole_weights(tiny_llama, tmp_path, variant):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = loaded(tiny_llama, lora=LoraConfig(rank=2, variant=variant, quantize="nf4"), checkpointing=True)
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
    plain = loaded(tmp_path)
    torch.testing.assert_close(plain(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    assert merged_state_dict(plain).keys() == merged_state_dict(loaded(tiny_llama)).keys()


def test_only_the_adapted_layers_are_rounded_and_by_little(tiny_llama):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    state = merged_state_dict(loaded(tiny_llama, lora=LoraConfig(quantize="nf4", target_modules=("q_proj",))))
    for name, whole in merged_state_dict(loaded(tiny_llama)).items():
        if "q_proj" in name:
            assert 0.01 < float((state[name] - whole).norm() / whole.norm()) < 0.15, name
        else:
            assert torch.equal(state[name], whole), name


# ---------------------------------------------------------------- digests


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{index:02d}": torch.full((2, 3), float(index)) for index in range(20)}


def test_the_digest_does_not_depend_on_order_or_memory_layout():
    shuffled = dict(reversed(list(tensors().items())))
    strided = {name: tensor.repeat(1, 2)[:, :3] for name, tensor in tensors().items()}
    assert weights_digest(tensors()) == weights_digest(shuffled) == weights_digest(strided)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["layer.00"].add_(1e-6),
        lambda state: state["layer.19"][1, 2].add_(1e-4),
        lambda state: state.pop("layer.01"),
        lambda state: state.update({"layer.01": state["layer.01"].to(torch.bfloat16)}),
        lambda state: state.update({"layer.01": state["layer.01"].reshape(3, 2)}),
    ],
    ids=["first", "last", "missing", "dtype", "shape"],
)
def test_the_digest_notices_a_change(change):
    state = tensors()
    change(state)
    assert weights_digest(state) != weights_digest(tensors())


def test_the_digest_reads_bfloat16_and_single_tensors():
    one = {"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}
    two = {"w": torch.tensor([1.0, 2.5], dtype=torch.bfloat16)}
    assert weights_digest(one) != weights_digest(two)
    assert len(weights_digest(one)) == 64
