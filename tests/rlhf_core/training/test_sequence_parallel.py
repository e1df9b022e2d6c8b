"""Two ranks that share every row, or every weight, against one that has it all."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import MistralConfig, MistralForCausalLM

from rlhf_core.algorithms.policy.clip import ClipLoss
from rlhf_core.algorithms.preference.dpo import DPOLoss
from rlhf_core.algorithms.token_math import CorrectionConfig
from rlhf_core.config.engines import TrainerConfig
from rlhf_core.config.models import InitModel
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.errors import ConfigError
from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.initialize import initialize_llama
from rlhf_core.models.loading import load_model
from rlhf_core.training.objectives.base import PolicyObjective, SftObjective, ValueObjective
from rlhf_core.training.objectives.preference import PairObjective
from rlhf_core.training.sequence_parallel import spread_rows
from rlhf_core.training.state import LAUNCHER
from tests.rlhf_core.training.conftest import TINY
from tests.rlhf_core.training.ranks import load, run_ranks
from tests.support.tolerances import near, of_training

PROGRAM = Path(__file__).with_name("sequence_parallel_program.py")
SHARED = {"engine": "deepspeed", "sequence_parallel": 2, "micro_batch": 3}
RATE = 0.1
"""The program's."""
SAME = of_training(TINY, steps=2)
PPO = PolicyObjective(ClipLoss(), 24, temperature=1.0, kl_coef=0.1, entropy_coef=0.01, correction=CorrectionConfig())


def reference(case: tuple[Any, ...], folder: Path) -> dict[str, Any]:
    """Return what the program makes of a case on one rank of the plain engine."""
    program = load(PROGRAM)
    spec, config, *rest = case
    made: dict[str, Any] = program.made(
        spec, TrainerConfig(engine="torch", micro_batch=config.micro_batch), *rest, folder
    )
    return made


@pytest.fixture(scope="module")
def one_key_head(policy_folder: Path, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("one_key_head")
    shutil.copytree(policy_folder, folder, dirs_exist_ok=True)
    shape = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 1, "intermediate_size": 64, "max_positions": 64}
    initialize_llama(InitModel(vocab_size=320, **shape), folder, seed=8)
    return str(folder)


@pytest.fixture
def cases(
    policy_folder: Path,
    one_key_head: str,
    token_samples: list[Any],
    preference_samples: list[Any],
    policy_samples: list[Any],
    value_samples: list[Any],
) -> dict[str, Any]:
    lm = ModelSpec(str(policy_folder), "lm", None, 3)
    plain = TrainerConfig(**SHARED)
    deep = TrainerConfig(**SHARED, zero_stage=2, gradient_checkpointing=True)
    weights = TrainerConfig(engine="deepspeed", tensor_parallel=2, zero_stage=1, micro_batch=3)
    value = ModelSpec(lm.path, "value", None, 3)
    sft = SftObjective(pack_to=None)
    return {
        "sft": (lm, plain, sft, token_samples),
        "packed": (lm, plain, SftObjective(pack_to=25), token_samples),
        "one_key_head": (ModelSpec(one_key_head, "lm", None, 3), plain, SftObjective(pack_to=25), token_samples),
        "dpo": (lm, plain, PairObjective(DPOLoss(), nll_coef=0.1, length_alpha=1.0), preference_samples),
        "ppo": (lm, plain, PPO, policy_samples),
        "value": (value, plain, ValueObjective(clip=None), value_samples),
        "checkpointed_zero2": (lm, deep, SftObjective(pack_to=25), token_samples),
        "zero3": (lm, plain.model_copy(update={"zero_stage": 3}), sft, token_samples),
        "weights": (lm, weights, SftObjective(pack_to=25), token_samples),
        "weights_of_values": (value, weights, ValueObjective(clip=None), value_samples),
    }


@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_that_share_rows_or_weights_are_one_rank(cases, tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    for name, (left, right) in run_ranks(PROGRAM, cases, tmp_path).items():
        one = reference(cases[name], tmp_path / f"{name}_alone")
        assert left["resumed"] == left["steps"][2:], name
        for own, other, alone in zip(left["steps"], right["steps"], one["steps"], strict=True):
            assert own == other, name
            assert own == near(alone, SAME), name
        for row, expected in zip(left["measured"], one["measured"], strict=True):
            assert row == near(expected, SAME), name
        assert left["weights"].keys() == one["weights"].keys(), name
        for key, weight in one["weights"].items():
            atol = 2 * RATE * SAME  # gradients are below 1 here, and Adam does not divide by them: eps is 1
            torch.testing.assert_close(left["weights"][key], weight, rtol=1e-6, atol=atol, msg=f"{name}: {key}")


def test_what_cannot_be_shared_is_refused(policy_spec, monkeypatch):
    model = load_model(policy_spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")
    with pytest.raises(ConfigError, match="sequence_parallel = 2: does not divide the 1 train workers"):
        spread_rows(model, 2)
    for name, value in zip(LAUNCHER, ("0", "3", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="sequence_parallel = 3: does not divide the 4 attention heads"):
        spread_rows(model, 3)


def test_settings_that_do_not_go_together_are_refused():
    for name, value in (("engine", "torch"), ("attention", "eager"), ("router_aux_coef", 0.1)):
        with pytest.raises(ValidationError, match=f"{name} = .* cannot be combined with it"):
            TrainerConfig(**SHARED | {name: value})
    with pytest.raises(
        ValidationError, match="sequence_parallel, tensor_parallel = 2, 1: does not divide train_workers = 3"
    ):
        RuntimeConfig(train_workers=3, trainer=TrainerConfig(**SHARED))
    with pytest.raises(ValidationError, match="zero_stage = 0 cannot be combined with it; set zero_stage to 1 or 2"):
        TrainerConfig(tensor_parallel=2)


def test_attention_in_a_window_is_refused(tmp_path):
    """In a group of one: what is asked of attention is known only when it runs."""
    shape = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    model = MistralForCausalLM(shape)
    spread_rows(model, 1)
    ids = torch.arange(6).unsqueeze(0)
    with pytest.raises(ConfigError, match=r"MistralAttention asks for \{'sliding_window': 8\}"):
        model.base_model(input_ids=ids, position_ids=ids)
