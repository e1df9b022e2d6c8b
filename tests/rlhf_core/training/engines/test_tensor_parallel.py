"""Architectures that train alike on two ranks that share every weight, and those that are refused."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rlhf_core.config.engines import OptimizerConfig, TrainerConfig
from rlhf_core.config.models import LoraConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.loading import load_model
from rlhf_core.training.engines.base import open_engine
from rlhf_core.training.engines.tensor_parallel import PROVEN, check_partition, partition_settings, whole_layers
from rlhf_core.training.objectives.base import SftObjective
from rlhf_core.types import TokenSample
from tests.rlhf_core.training.ranks import load, run_ranks
from tests.support.tolerances import assert_same_movement, roundings

PROGRAM = Path(__file__).parents[1] / "sequence_parallel_program.py"
SPLIT = TrainerConfig(engine="deepspeed", tensor_parallel=2, zero_stage=1, micro_batch=3)
VOCABULARY = 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Large, so that attention is not the mean of what it sees and the norms before it matter.
    "initializer_range": 0.3,
}
# Windows shorter than the longest row, where an architecture has them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},  # with its caps, which only eager attention has
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "granite": {},
    "smollm3": {},
    "olmo": {},
    "stablelm": {"use_qkv_bias": True},
    "cohere": {},
    "cohere2": {"sliding_window": 8},
    "helium": {},
}
REFUSED: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "phi3": {},
    "starcoder2": {},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "cohere": {"use_qk_norm": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
}


def model_of(family: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto import CONFIG_MAPPING

    shape = CONFIG_MAPPING[family](**SHAPE | settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(shape)


def samples() -> list[TokenSample]:
    generator = random.Random(11)
    return [
        TokenSample(tuple(generator.randrange(3, VOCABULARY) for _ in range(length)), (0, *(1,) * (length - 1)))
        for length in (5, 17, 9, 12, 8, 21)
    ]


@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_that_share_weights_are_one_rank_in_every_family(tmp_path):
    """A parameter whose gradient sees one rank's heads only lacks the other's part, half of its way: Qwen3's and Gemma 3's
    norms over one head, where their gradients are not summed."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    torch.set_num_threads(1)
    rows, sft, cases = samples(), SftObjective(pack_to=None), {}
    for name, settings in FAMILIES.items():
        model = model_of(name, settings)
        model.save_pretrained(tmp_path / f"{name}_model")
        split = SPLIT.model_copy(update={"attention": "eager"}) if name == "gemma2" else SPLIT
        cases[name] = (ModelSpec(str(tmp_path / f"{name}_model"), "lm", None, 3), split, sft, rows)
    made = run_ranks(PROGRAM, cases, tmp_path)
    share = roundings(1000)  # more than the way through two layers of width 32 and a head of 64
    for name, (left, right) in made.items():
        spec, split, *rest = cases[name]
        alone = TrainerConfig(engine="torch", micro_batch=split.micro_batch, attention=split.attention)
        one = load(PROGRAM).made(spec, alone, *rest, tmp_path / f"{name}_alone")
        assert left["steps"] == right["steps"], name
        assert left["resumed"] == left["steps"][2:], name
        for step, (own, whole) in enumerate(zip(left["steps"], one["steps"], strict=True)):
            assert own == pytest.approx(whole, rel=4 * share if "grad_norm" in own else share, abs=share), (name, step)
        assert left["weights"].keys() == one["weights"].keys(), name
        for key, weight in one["weights"].items():
            assert_same_movement(left["weights"][key], weight, one["start"][key], name=f"{name}: {key}")


def test_the_families_are_those_of_the_list():
    assert set(FAMILIES) == PROVEN


@pytest.mark.parametrize(("family", "settings"), REFUSED.items())
def test_other_architectures_are_refused(family, settings):
    model = model_of(family, settings)
    with pytest.raises(ConfigError, match=r"runtime\.trainer\.tensor_parallel = "):
        check_partition(model, 2, world=2)


def test_heads_workers_and_layers_must_be_divisible(policy_spec):
    model = load_model(policy_spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    check_partition(model, 2, world=2)
    with pytest.raises(ConfigError, match="tensor_parallel = 2: does not divide the 3 train workers"):
        check_partition(model, 2, world=3)
    with pytest.raises(ConfigError, match="tensor_parallel = 4: does not divide the 2 key heads"):
        check_partition(model, 4, world=4)
    model.base_model.layers = nn.ModuleList()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no layers \['down_proj', 'gate_proj'"):
        check_partition(model, 2, world=2)


def test_adapters_and_averages_are_refused(policy_spec):
    with pytest.raises(ConfigError, match=r"lora = 'set': cannot be combined with runtime\.trainer\.tensor_parallel"):
        open_engine(replace(policy_spec, lora=LoraConfig()), OptimizerConfig(), SPLIT)
    with pytest.raises(ConfigError, match=r"optimizer.ema_decay = 'set': cannot be combined with"):
        open_engine(policy_spec, OptimizerConfig(ema_decay=0.9), SPLIT)


def test_layers_are_split_by_columns_or_rows():
    columns, rows = partition_settings(4)["partition_config"]["layer_specs"]
    assert columns == {
        "patterns": [r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$"],
        "partition_type": "column",
    }
    assert rows == {"patterns": [r".*\.(o_proj|down_proj)\.(weight|bias)$"], "partition_type": "row"}


def test_the_parts_come_back_as_the_tensors_that_they_were():
    class Part(nn.Linear):
        def gather_params(self, parameters: list[nn.Parameter]) -> None:
            for parameter in parameters:
                parameter.data = torch.cat([parameter.data, parameter.data])

    layer = Part(3, 2, bias=False)
    before = layer.weight.data.data_ptr()
    other = Part(3, 2, bias=False)
    with whole_layers(nn.Sequential(layer, other), [layer.weight]):
        assert (layer.weight.shape, other.weight.shape) == ((4, 3), (2, 3))
    assert (layer.weight.shape, layer.weight.data.data_ptr()) == ((2, 3), before)
