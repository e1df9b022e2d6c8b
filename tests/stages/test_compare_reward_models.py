"""Reward models on the same pairs: the one that learned them is right, the one that learned the opposite is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.policy import LoopConfig
from rlhf_core.data.tables import read_preferences, write_preferences
from rlhf_core.errors import DataError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef, PreferencesRef
from stages.compare_reward_models import CompareRewardModelsConfig
from stages.reward_model import RewardModelConfig
from tests.support.training import preferences
from tests.support.workshop import Workshop

CONFIG = RewardModelConfig(
    max_length=48, loop=LoopConfig(batch_size=4, epochs=2), optimizer=OptimizerConfig(learning_rate=3e-3)
)


def turned(store: ArtifactStore, source: PreferencesRef, folder: Path) -> PreferencesRef:
    """The same pairs with chosen and rejected exchanged."""
    for split in ("train", "eval"):
        rows = read_preferences(store.path(source) / f"{split}.parquet")
        write_preferences(
            folder / f"{split}.parquet", [replace(row, chosen=row.rejected, rejected=row.chosen) for row in rows]
        )
    return store.external(PreferencesRef, folder)


def test_each_reward_model_is_measured_on_the_same_pairs(tmp_path, store, policy):
    shop = Workshop(store)
    start, pairs = store.external(PolicyRef, policy), preferences(store, tmp_path, held_out=6)
    models = {
        name: shop.run("reward_model", CONFIG, {"policy": start, "preferences": rows})[0]
        for name, rows in (("after", pairs), ("before", turned(store, pairs, tmp_path / "turned")))
    }
    inputs = {"reward_models": models, "preferences": pairs}
    ref, decision = shop.run("compare_reward_models", CompareRewardModelsConfig(), inputs)
    metrics = shop.metrics(decision)
    assert (metrics["pairs"], metrics["after/accuracy"], metrics["before/accuracy"]) == (6, 1.0, 0.0)
    report = json.loads((store.path(ref) / "report.json").read_text())
    assert report.keys() == {"after", "before"} and report["after"]["prompts"] == 6
    assert report["after"]["accuracy_low"] > 0.5 and report["before"]["accuracy_high"] < 0.5
    assert (metrics["after/over/before"], metrics["before/over/after"]) == (1.0, -1.0)
    assert 0.0 < metrics["after/over/before_low"] == -metrics["before/over/after_high"] < 1.0
    everything = shop.run("compare_reward_models", CompareRewardModelsConfig(split="all"), inputs)[1]
    assert shop.metrics(everything)["pairs"] > 6


def test_without_held_out_pairs_it_says_what_to_do(tmp_path, store):
    inputs = {"reward_models": {}, "preferences": preferences(store, tmp_path, held_out=0)}
    with pytest.raises(DataError, match='holds no pair; set split = "all", or hold pairs out'):
        Workshop(store).run("compare_reward_models", CompareRewardModelsConfig(), inputs)
