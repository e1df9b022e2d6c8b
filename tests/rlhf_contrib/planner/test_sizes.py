"""Parameters are counted without weights, as transformers makes them."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_contrib.planner.sizes import BY_FORMULA, shape_of, shape_of_init
from rlhf_core.config.models import InitModel, LoraConfig
from rlhf_core.errors import ConfigError

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
FAMILIES = {
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "wide heads": {"model_type": "qwen3", "head_dim": 32},
    "on meta": {"model_type": "gemma", "head_dim": 16},
    "other names": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4},
    "experts": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shape_has_the_parameters_that_transformers_makes(tmp_path, family):
    written = FAMILIES[family]
    (tmp_path / "config.json").write_text(
        json.dumps((SMALL if family != "other names" else {"vocab_size": 300}) | written)
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    found = shape_of(tmp_path)
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.largest == max(one.numel() for one in model.parameters())
    assert (found.layers, found.hidden, found.vocabulary) == (3, 64, 300)
    linear = sum(one.inputs * one.outputs * one.count for one in found.linears)
    assert linear == sum(
        one.weight.numel()
        for one in model.modules()
        if type(one).__name__ in ("Linear", "Conv1D") and one is not model.get_output_embeddings()
    )


def test_numbers_by_hand():
    # hidden 64, MLP 96, 4 heads of 16, 2 of keys: q, o 64 * 64; k, v 64 * 32; MLP 3 * 64 * 96; two norms of 64
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    shape = shape_of_init(
        InitModel(vocab_size=300, hidden_size=64, layers=3, heads=4, kv_heads=2, intermediate_size=96)
    )
    assert shape.parameters == 300 * 64 + 3 * layer + 64
    assert shape.without_head().parameters == shape.parameters + 64  # a score; the tied head was the embedding
    # rank 8: (in + out) of q, o 128 each, of k, v 96 each, of the MLP 160 each, in three layers
    assert shape.adapters(LoraConfig(rank=8)) == 3 * 8 * (2 * 128 + 2 * 96 + 3 * 160)
    assert shape.adapters(LoraConfig(rank=8, target_modules=("q_proj",), variant="dora")) == 3 * (8 * 128 + 64)


def test_a_token_meets_some_of_the_experts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | FAMILIES["experts"]))
    found = shape_of(tmp_path)
    experts = 3 * 4 * 3 * 64 * 96  # layers, experts, three matrices
    assert found.parameters - found.active == 300 * 64 + experts // 2
    lora = LoraConfig(rank=8, target_modules=("q_proj",))
    both = lora.model_copy(update={"target_parameters": ("experts.gate_up_proj", "experts.down_proj")})
    # in three layers four experts each: gate and up of 64 to 2 * 96, down of 96 to 64
    assert found.adapters(both) - found.adapters(lora) == 3 * 4 * 8 * (64 + 192 + 96 + 64)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path = .*: has no config\.json; give the folder of a model"):
        shape_of(tmp_path)
    assert "gemma" not in BY_FORMULA


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{bad", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"model_type": "llama", "hidden_size": 64}', "KeyError: 'num_hidden_layers'"),
        (json.dumps(SMALL | {"model_type": "llama", "num_hidden_layers": 0}), "sizes must be at least 1"),
        ('{"model_type": "nosuch"}', "does not recognize this architecture"),
    ],
)
def test_a_config_that_describes_no_model_is_refused_with_the_reason(tmp_path, text, problem):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"model\.path = .*describes no model \(.*{problem}.*\); correct it"):
        shape_of(tmp_path)
