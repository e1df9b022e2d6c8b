"""The reward model tells good from bad, carries its contract, and loads with plain transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from rlhf_core.artifacts import ArtifactStore
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.loop import LoopConfig
from rlhf_core.types import PolicyRef, TokenSample
from stages.reward_model import RewardModelConfig, scored_ids
from tests.stages.recording import Workshop, make_policy
from tests.stages.training import killed_and_resumed, preferences

CONFIG = RewardModelConfig(
    max_length=48,
    loop=LoopConfig(batch_size=4, epochs=2, eval_every=8, checkpoint_every=3),
    optimizer=OptimizerConfig(learning_rate=3e-3),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def test_it_separates_the_pairs_and_transformers_returns_the_same_scores(tmp_path: Path, policy: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    shop = Workshop(ArtifactStore(tmp_path / "store"))
    inputs = {"policy": shop.store.external(PolicyRef, policy), "preferences": preferences(shop.store, tmp_path)}
    ref, decision = shop.run("reward_model", CONFIG, inputs)
    metrics = shop.metrics(decision)
    assert (metrics["eval/accuracy"], metrics["held_out/accuracy"]) == (1.0, 1.0)
    assert metrics["dropped_pairs"] == 0

    folder = shop.store.path(ref)
    contract = json.loads((folder / "contract.json").read_text())
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for ids, score in zip(contract["probe"], contract["probe_scores"], strict=True):
        with torch.no_grad():
            assert model(torch.tensor([ids])).logits.item() == pytest.approx(score, abs=1e-5)


def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, policy: Path) -> None:
    weights = []
    for name in ("whole", "killed"):
        shop = Workshop(ArtifactStore(tmp_path / name / "store"))
        inputs = {
            "policy": shop.store.external(PolicyRef, policy),
            "preferences": preferences(shop.store, tmp_path / name),
        }
        made = shop.run("reward_model", CONFIG, inputs)[0] if name == "whole" else None
        ref = made or killed_and_resumed(shop, "reward_model", CONFIG, inputs, at=8)
        weights.append((shop.store.path(ref) / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_an_average_of_weights_is_refused_since_the_contract_is_of_the_weights() -> None:
    with pytest.raises(ValidationError, match=r"optimizer\.ema_decay = 0\.9: the report and the probe scores"):
        RewardModelConfig.model_validate({"optimizer": {"ema_decay": 0.9}})


def test_adapters_are_not_offered() -> None:
    with pytest.raises(ValidationError, match="lora"):
        RewardModelConfig.model_validate({"lora": {"rank": 4}})


def test_a_sequence_is_scored_where_its_answer_ends() -> None:
    # a template that writes a newline (9) after the end of the turn (2): sampled answers end at 2
    assert scored_ids(TokenSample((5, 6, 7, 2, 9), (0, 0, 1, 1, 0))) == (5, 6, 7, 2)
