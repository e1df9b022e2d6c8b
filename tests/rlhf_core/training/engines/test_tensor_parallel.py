"""What cannot be split is refused; that two ranks are one is in test_sequence_parallel.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rlhf_core.config.engines import LoraConfig, OptimizerConfig, TrainerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.loading import load_model
from rlhf_core.training.engines.base import open_engine
from rlhf_core.training.engines.tensor_parallel import check_partition, partition_settings, whole_layers

SPLIT = TrainerConfig(tensor_parallel=2, zero_stage=1)


def test_heads_workers_and_layers_must_be_divisible(policy_spec: ModelSpec) -> None:
    model = load_model(policy_spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    check_partition(model, 2, world=2)
    with pytest.raises(ConfigError, match="tensor_parallel = 2: does not divide the 3 train workers"):
        check_partition(model, 2, world=3)
    with pytest.raises(ConfigError, match="tensor_parallel = 4: does not divide the 2 key heads"):
        check_partition(model, 4, world=4)
    model.base_model.layers = nn.ModuleList()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no layers \['down_proj', 'gate_proj'"):
        check_partition(model, 2, world=2)


def test_adapters_and_averages_are_refused(policy_spec: ModelSpec) -> None:
    with pytest.raises(ConfigError, match=r"lora = 'set': cannot be combined with runtime\.trainer\.tensor_parallel"):
        open_engine(replace(policy_spec, lora=LoraConfig()), OptimizerConfig(), SPLIT)
    with pytest.raises(ConfigError, match=r"optimizer.ema_decay = 'set': cannot be combined with"):
        open_engine(policy_spec, OptimizerConfig(ema_decay=0.9), SPLIT)


def test_layers_are_split_by_columns_or_rows() -> None:
    columns, rows = partition_settings(4)["partition_config"]["layer_specs"]
    assert columns == {
        "patterns": [r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)$"],
        "partition_type": "column",
    }
    assert rows == {"patterns": [r".*\.(o_proj|down_proj)\.(weight|bias)$"], "partition_type": "row"}


def test_the_parts_come_back_as_the_tensors_that_they_were() -> None:
    class Part(nn.Linear):
        def gather_params(self, parameters: list[nn.Parameter]) -> None:
            for parameter in parameters:
                parameter.data = torch.cat([parameter.data, parameter.data])

    layer = Part(3, 2, bias=False)
    before = layer.weight.data.data_ptr()
    with whole_layers(nn.Sequential(layer)):
        assert layer.weight.shape == (4, 3)
    assert (layer.weight.shape, layer.weight.data.data_ptr()) == ((2, 3), before)
