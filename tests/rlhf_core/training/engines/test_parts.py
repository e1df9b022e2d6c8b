"""Models with adapters and with experts under ZeRO 3: read in parts, they are the ones that every rank reads whole."""

import shutil
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core.config.models import InitModel, LoraConfig
from tests.rlhf_core.training.ranks import run_ranks, start_ranks
from tests.support.tolerances import assert_same_updates, near, of_training

PROGRAM = Path(__file__).with_name("parts_program.py")
SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen2_moe": {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2},
    "jamba": {"num_experts": 4, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "ernie4_5_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
AS_LLAMA = InitModel(
    vocab_size=320, hidden_size=64, layers=2, heads=4, kv_heads=2, intermediate_size=96, max_positions=64
)
"""For tolerances: a token meets two experts of a width of 48."""
LORA = LoraConfig(rank=4, target_modules="all-linear")
EXPERTS = LORA.model_copy(update={"target_parameters": ("experts.gate_up_proj", "experts.down_proj")})
DORA = LORA.model_copy(update={"variant": "dora"})
CASES = {
    "llama_lora": ("llama", "lm", LORA, "float32"),
    "llama_dora": ("llama", "lm", DORA, "float32"),
    "llama_lora_value": ("llama", "value", LORA, "bfloat16"),
    "qwen3_lora": ("qwen3", "lm", LORA, "float32"),
    "qwen2_moe": ("qwen2_moe", "lm", None, "float32"),
    "qwen3_moe": ("qwen3_moe", "lm", None, "bfloat16"),
    "qwen3_moe_lora": ("qwen3_moe", "lm", LORA, "float32"),
    "mixtral": ("mixtral", "lm", None, "float32"),
    "gpt_oss": ("gpt_oss", "lm", None, "float32"),
    "gpt_oss_lora": ("gpt_oss", "lm", LORA, "bfloat16"),
    "qwen3_moe_lora_experts": ("qwen3_moe", "lm", EXPERTS, "float32"),
    "gpt_oss_lora_experts": ("gpt_oss", "lm", EXPERTS, "float32"),
    "jamba_lora": ("jamba", "lm", LORA, "float32"),
    # Has biases of its routers in float32 buffers, which stay so; Ernie has biases and routers in float32 parameters.
    "deepseek_v3": ("deepseek_v3", "lm", None, "bfloat16"),
    "ernie4_5_moe": ("ernie4_5_moe", "lm", None, "bfloat16"),
}
IN_BFLOAT16 = {
    f"{family}_lora_bfloat16": (family, "lm", LORA, "bfloat16") for family in ("llama", "qwen3", "mixtral", "jamba")
}
"""The other half of the families' dtypes, only with FULL=1. The cases above have both of Qwen3-MoE and gpt-oss."""
RESUMED = ("llama_lora", "qwen3_moe_lora_experts", "mixtral")
ON_GPU = ("llama_dora", "qwen3_moe_lora", "gpt_oss_lora_experts", "deepseek_v3")
LEAVES = {"qwen2_moe", "qwen3_moe", "mixtral"}
"""Cases whose blocks of experts DeepSpeed makes leaf modules, which adds hooks that the checks of a model must not fire."""
Runs = Callable[..., dict[str, list[Any]]]


def on_ranks(ranks: int, case: str) -> Any:
    """A case on this number of ranks. Two ranks read unequal parts and send them; more do the same more slowly."""
    return pytest.param(ranks, case, marks=[pytest.mark.full] if ranks != 2 or case in IN_BFLOAT16 else [])


@pytest.fixture(scope="session")
def cases(policy_folder: Path, tmp_path_factory) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("families")
    for family, options in FAMILIES.items():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | options))
        for name, one in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                one.copy_(5 + torch.rand(one.shape) / 100)  # bfloat16 values are 0.03 apart there
        model.save_pretrained(root / family)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(policy_folder / name, root / family / name)
    return {
        name: {
            "folder": str(root / family),
            "head": head,
            "lora": lora,
            "dtype": dtype,
            "attention": "eager" if family == "gpt_oss" else "sdpa",
            "checkpoint": "",
        }
        for name, (family, head, lora, dtype) in (CASES | IN_BFLOAT16).items()
    }


@pytest.fixture(scope="session")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="session")
def runs(cases, out) -> Runs:
    """Results of each rank by case, for a number of ranks, which may resume what killed ones have left."""

    @cache
    def run(ranks: int, checkpoints: Path | None, in_bfloat16: bool) -> dict[str, list[Any]]:
        if checkpoints is None:
            names = IN_BFLOAT16 if in_bfloat16 else CASES
            return run_ranks(PROGRAM, {name: cases[name] for name in names}, out, ranks=ranks)
        resumed = {f"{name}_resumed": cases[name] | {"checkpoint": str(checkpoints / name)} for name in RESUMED}
        return run_ranks(PROGRAM, resumed, checkpoints, ranks=ranks)

    return lambda ranks, checkpoints=None, in_bfloat16=False: run(ranks, checkpoints, in_bfloat16)


@pytest.fixture(scope="session")
def on_made_up_gpus(cases, tmp_path_factory) -> dict[str, list[Any]]:
    """Results of two ranks by case, each with a made-up GPU."""
    chosen = {name: cases[name] for name in ON_GPU}
    return run_ranks(PROGRAM, chosen, tmp_path_factory.mktemp("gpus"), "made-up-gpu")


@pytest.fixture(scope="session")
def left_by_two(cases, tmp_path_factory) -> Path:
    """Checkpoints after the first step, left by two ranks that were killed in the second step."""
    out = tmp_path_factory.mktemp("killed")
    torch.save({name: cases[name] for name in RESUMED}, out / "cases.pt")
    programs = start_ranks(PROGRAM, out / "cases.pt", out, "until-killed", ranks=2, folder=out / "said")
    deadline = time.monotonic() + 300
    while len(list(out.glob("begun_*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    for program in programs:
        program.kill()
    errors = "\n".join(program.communicate(timeout=60)[1][-3000:] for program in programs)
    assert [program.returncode for program in programs] == [-signal.SIGKILL] * 2, errors
    assert len(list(out.glob("begun_*"))) == 2, errors
    return out


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "case"), [on_ranks(ranks, case) for ranks in (1, 2, 4) for case in CASES | IN_BFLOAT16]
)
def test_adapters_and_experts_are_the_same_in_parts_and_whole(ranks, case, runs, out):
    for ways in runs(ranks, in_bfloat16=case in IN_BFLOAT16)[case]:
        parts, whole = ways["parts"], ways["whole"]
        assert ways["in_parts"] is True
        assert parts["history"] == whole["history"]
        assert parts["weights"].keys() == whole["weights"].keys()
        for name, weight in whole["weights"].items():
            assert torch.equal(parts["weights"][name], weight), name
        assert parts["idle"] == whole["idle"]
        assert parts["leaves"] > 0 or case not in LEAVES
        # A whole model comes from rank 0 once more. In parts only adapters and the head of a value model do.
        assert parts["sent"] < whole["sent"] / (2 if "lora" in case or "dora" in case else 100)
        assert parts["buffers"].keys() == whole["buffers"].keys()
        for name, one in whole["buffers"].items():
            assert one.dtype == parts["buffers"][name].dtype and torch.equal(one, parts["buffers"][name]), name
    files = [(out / f"{case}_{way}_of_{ranks}" / "model.safetensors").read_bytes() for way in ("parts", "whole")]
    assert files[0] == files[1]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe_lora", "mixtral", "gpt_oss", "gpt_oss_lora"])
def test_no_stack_of_experts_waits_in_memory_for_the_backward_pass(case, runs):
    """Some operations save a view of a stack: it would keep the whole stack, and those of all layers at once."""
    for made in (ways[way] for ways in runs(2)[case] for way in ("parts", "whole")):
        assert made["kept"] == [False] * 4  # two stacks in each of two layers


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_training_that_was_killed_resumes_with_another_number_of_ranks(ranks, case, runs, left_by_two):
    """A step of two ranks and one of others are two steps of two ranks, but for the order of sums."""
    before, after = (
        [rank["parts"] for rank in made] for made in (runs(2)[case], runs(ranks, left_by_two)[f"{case}_resumed"])
    )
    loss, again = (sum(rank["history"][-1][0] for rank in made) for made in (before, after))
    assert again == near(loss, of_training(AS_LLAMA, steps=2))
    assert after[0]["history"][-1][1] == near(before[0]["history"][-1][1], of_training(AS_LLAMA, steps=2))
    assert after[0]["weights"].keys() == before[0]["weights"].keys()
    one, other = (torch.cat([w.flatten().double() for w in made[0]["weights"].values()]) for made in (before, after))
    assert_same_updates(one.tolist(), other.tolist(), shape=AS_LLAMA, rates=(1e-2, 1e-2))


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("case", ON_GPU)
def test_every_tensor_is_on_the_gpu_of_its_rank(case, runs, on_made_up_gpus):
    """On a made-up GPU, where an operation on tensors of two devices fails; all numbers are as on the CPU."""
    for on_gpu, on_cpu in zip(on_made_up_gpus[case], runs(2)[case], strict=True):
        made, expected = on_gpu["parts"], on_cpu["parts"]
        assert made["strays"] == []
        assert made["history"] == expected["history"]
        assert made["weights"].keys() == expected["weights"].keys()
        for name, weight in expected["weights"].items():
            assert torch.equal(made["weights"][name], weight), name
