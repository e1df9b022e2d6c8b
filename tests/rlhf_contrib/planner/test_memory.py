"""The memory of a rank by hand; benchmarks/planner.py compares it with processes."""

from dataclasses import replace

import pytest

from benchmarks.planner import on_one_machine
from rlhf_contrib.planner.memory import Role, activations, rank_memory
from rlhf_contrib.planner.sizes import Linear, shape_of_init
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import InitModel, LoraConfig

SHAPE = shape_of_init(
    InitModel(vocab_size=1000, hidden_size=4096, layers=36, heads=32, kv_heads=8, intermediate_size=14336)
)
P = SHAPE.parameters  # 7.9e9
B = 2e8
TRAINED, FROZEN = Role("policy", SHAPE, True, 4096), Role("reference", SHAPE, False, 4096)
ADAPTED = Role("policy", SHAPE, True, 4096, lora=LoraConfig(rank=64))
A = SHAPE.adapters(LoraConfig(rank=64))

RESIDENT = {
    # role, settings, ranks -> bytes between steps
    "zero 3, bfloat16": (TRAINED, {"zero_stage": 3, "dtype": "bfloat16"}, 8, 18 * P / 8 + 2 * B),
    "zero 3, float32": (TRAINED, {"zero_stage": 3}, 8, 20 * P / 8 + 4 * B),
    "zero 3, offloaded": (TRAINED, {"zero_stage": 3, "dtype": "bfloat16", "offload_optimizer": True}, 8, P / 4 + 2 * B),
    "zero 3, frozen": (FROZEN, {"zero_stage": 3, "dtype": "bfloat16"}, 8, 2 * P / 8),
    "zero 3, adapters": (ADAPTED, {"zero_stage": 3, "dtype": "bfloat16"}, 8, 2 * (P + A) / 8 + 16 * A / 8 + 2 * B),
    "stage 0 in bfloat16 is 1": (TRAINED, {"dtype": "bfloat16"}, 8, 6 * P + 12 * P / 8),
    "zero 1, float32": (TRAINED, {"zero_stage": 1}, 4, 4 * P + 12 * P / 4),
    "zero 2, bfloat16": (TRAINED, {"zero_stage": 2, "dtype": "bfloat16"}, 4, 2 * P + 12 * P / 4),
    "zero 0, float32": (TRAINED, {}, 4, 12 * P),
    "frozen below zero 3": (FROZEN, {"dtype": "bfloat16"}, 4, 2 * P),
    "torch": (TRAINED, {"engine": "torch"}, 1, 12 * P),
    "torch, bfloat16 passes": (ADAPTED, {"engine": "torch", "dtype": "bfloat16"}, 1, 4 * (P + A) + 8 * A),
}


@pytest.mark.parametrize("case", RESIDENT)
def test_memory_between_steps(case):
    role, settings, ranks, expected = RESIDENT[case]
    assert rank_memory(role, TrainerConfig(**settings), ranks).total == pytest.approx(expected)


def test_offloading_moves_sixteen_bytes_a_parameter_to_the_host():
    config = TrainerConfig(zero_stage=3, dtype="bfloat16", offload_optimizer=True)
    assert sum(rank_memory(TRAINED, config, 8).host.values()) == pytest.approx(16 * P / 8)


def test_one_weight_is_whole_on_a_gpu_when_a_model_is_opened_and_handed_out():
    config = TrainerConfig(zero_stage=3, dtype="bfloat16")
    moments = rank_memory(TRAINED, config, 64).moments
    assert sum(moments["sync"].values()) == 2 * 2 * 4096 * 14336
    assert sum(moments["open"].values()) == 0  # less than what the states take that come later
    assert sum(rank_memory(FROZEN, config, 64).moments["open"].values()) == 2 * 4096 * 14336
    # Adapters are whole on every rank while a layer is gathered for them, less those states.
    adapted = sum(rank_memory(ADAPTED, config, 64).moments["open"].values())
    assert adapted == pytest.approx(max(0, 2 * (SHAPE.layer + A) - (16 * A / 64 + 2 * B)))


@pytest.mark.parametrize(
    ("checkpointing", "backward", "copies"),
    [(False, False, 1), (False, True, 36 + 1), (True, True, 1 + 1)],  # of 36 layers, and the gradient of one
)
def test_stacks_of_experts_with_adapters_are_computed_with_as_changed_copies(checkpointing, backward, copies):
    stacks = tuple(Linear(f"experts.{one}", 64, 32, 4) for one in ("up", "down") for _ in range(36))
    lora, one = LoraConfig(rank=8, target_parameters=("experts.up",)), 4 * 64 * 32
    role = Role("policy", replace(SHAPE, stacks=stacks), True, 8, lora=lora)
    config = TrainerConfig(zero_stage=3, dtype="bfloat16", gradient_checkpointing=checkpointing)
    assert activations(role, config, backward=backward)["changed stacks"] == 2 * one * copies
    assert rank_memory(role, config, 8).moments["sync"]["merged stacks"] == (2 + 4) * one


def test_activations_by_hand():
    role = Role("value_model", SHAPE.without_head(), True, 1000, logits=False)
    # A token: two norms of 4096 * (4 + 2 + 2), 3 * 4096 queries and outputs and 2 * 1024 keys and values, 4 * 14336 of the MLP
    layer = 1000 * (2 * 4096 * 8 + 2 * (3 * 4096 + 2 * 1024) + 2 * 4 * 14336)
    whole = TrainerConfig(dtype="bfloat16")
    assert activations(role, whole) == {"activations": 36 * layer}
    # Liger keeps the input and output of a norm, and three matrices of the MLP
    less = 1000 * (2 * 4096 * 4 + 2 * (3 * 4096 + 2 * 1024) + 2 * 3 * 14336)
    assert activations(role, whole.model_copy(update={"liger": True})) == {"activations": 36 * less}
    again = activations(role, whole.model_copy(update={"gradient_checkpointing": True}))
    assert again == {"inputs of layers": 36 * 1000 * 4096 * 2, "one layer": layer + 1000 * 6 * 14336}
    # 2^25 logits at most: three float32 matrices and one in bfloat16
    assert activations(TRAINED, whole)["logits"] == 4096 * 1000 * 14


def test_models_in_one_process_add_up_and_the_largest_moment_counts():
    config = TrainerConfig(engine="torch")
    both = on_one_machine({"a": rank_memory(TRAINED, config, 1), "b": rank_memory(FROZEN, config, 1)})
    assert sum(both["save"].values()) == pytest.approx(12 * P + 4 * P + 12 * P)
