"""The scalar head: how it starts, and that it survives saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhf_core.interfaces import ModelSpec
from rlhf_core.models.export import export_model
from rlhf_core.models.forward import initial_head, read_head
from rlhf_core.models.loading import load_model

IDS = torch.tensor([[1, 20, 30, 40, 4, 2, 50]])


def loaded(folder: Path, head: Any, seed: int = 5) -> Any:
    spec = ModelSpec(str(folder), head, None, seed)
    return load_model(spec, dtype="float32", attention="sdpa", gradient_checkpointing=False, device="cpu")


def test_a_fresh_head_has_variance_one_over_hidden_plus_one() -> None:
    head_1H = initial_head(40_000, seed=1)
    # The variance of 40,000 draws is known to 0.7 % (one standard error); 3 % is four of them.
    assert abs(head_1H.var().item() * 40_001 - 1) < 0.03
    assert torch.equal(head_1H, initial_head(40_000, seed=1))
    assert not torch.equal(head_1H, initial_head(40_000, seed=2))


def test_a_causal_lm_has_no_scalar_head(tiny_llama: Path) -> None:
    assert read_head(tiny_llama) is None


def test_a_value_model_from_a_causal_lm_starts_from_the_seed(tiny_llama: Path) -> None:
    assert torch.equal(loaded(tiny_llama, "value", seed=9).value_head.weight, initial_head(64, seed=9))


def test_a_value_model_from_a_reward_model_predicts_its_scores(tiny_llama: Path, tmp_path: Path) -> None:
    reward = loaded(tiny_llama, "score")
    export_model(reward, tmp_path, tokenizer_from=tiny_llama)
    value = loaded(tmp_path, "value", seed=77)
    with torch.no_grad():
        assert torch.equal(value(IDS)[0, -1], reward(input_ids=IDS).logits[0, 0])


def test_a_value_model_comes_back_from_its_folder(tiny_llama: Path, tmp_path: Path) -> None:
    value = loaded(tiny_llama, "value", seed=9)
    with torch.no_grad():
        value.value_head.weight.mul_(3.0)
    export_model(value, tmp_path, tokenizer_from=tiny_llama)
    again = loaded(tmp_path, "value", seed=1)
    with torch.no_grad():
        assert torch.equal(again(IDS), value(IDS))
    assert not list(tmp_path.glob("*.bin"))
