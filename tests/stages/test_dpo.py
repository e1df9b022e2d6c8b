"""DPO raises what is chosen over what is rejected, keeps the reference's log-probs, and resumes bitwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_core.artifacts import ArtifactStore
from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.config.loop import LoopConfig
from rlhf_core.types import PolicyRef
from stages.dpo import DPOConfig
from tests.stages.recording import Workshop, make_policy
from tests.stages.training import killed_and_resumed, preferences

CONFIG = DPOConfig(
    max_length=48,
    beta=0.5,
    loop=LoopConfig(batch_size=4, epochs=1, eval_every=8, checkpoint_every=3),
    optimizer=OptimizerConfig(learning_rate=2e-3),
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_the_margin_grows_from_exactly_zero(tmp_path: Path, policy: Path, loss: str) -> None:
    shop = Workshop(ArtifactStore(tmp_path / "store"))
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "preferences": preferences(shop.store, tmp_path)}
    ref, decision = shop.run("dpo", CONFIG.model_copy(update={"loss": loss}), inputs)
    margins = [values["dpo/eval/rewards/margin"] for _, values in shop.tracker.points if "dpo/eval/loss" in values]
    assert margins[0] == pytest.approx(0.0, abs=1e-4)  # policy == reference; sums of fp32 log-probs of ~ -80
    assert shop.metrics(decision)["eval/rewards/margin"] > 0.2
    assert ref.digest != base.digest


def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, policy: Path) -> None:
    refs = []
    for name in ("whole", "killed"):
        shop = Workshop(ArtifactStore(tmp_path / name / "store"))
        base = shop.store.external(PolicyRef, policy)
        inputs = {"policy": base, "reference": base, "preferences": preferences(shop.store, tmp_path / name)}
        made = shop.run("dpo", CONFIG, inputs)[0] if name == "whole" else None
        refs.append(made or killed_and_resumed(shop, "dpo", CONFIG, inputs, at=5))
    assert refs[0].digest == refs[1].digest


def test_label_smoothing_belongs_to_the_losses_that_use_it() -> None:
    with pytest.raises(ValidationError, match=r"label_smoothing = 0\.1: must be > 0 for loss cdpo"):
        DPOConfig(loss="dpo", label_smoothing=0.1)
    with pytest.raises(ValidationError, match="loss is 'cdpo'"):
        DPOConfig(loss="cdpo")
