"""Policy optimisation: the order of prompts, the first ratio, learning, and a killed run's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.artifacts import ArtifactStore
from rlhf_core.config.engines import OptimizerConfig, SamplingConfig
from rlhf_core.config.rewards import FunctionReward, RewardsConfig
from rlhf_core.types import Generation, Message, PolicyRef, Prompt
from stages.ppo import PPOConfig, prompts_at
from tests.stages.recording import Workshop, make_policy
from tests.stages.training import killed_and_resumed, prompts

PROMPTS = [Prompt(f"p{i}", (Message("user", str(i)),), "", "test") for i in range(5)]


def short_is_good(generations: Sequence[Generation]) -> list[float]:
    """A reward that a random policy can learn: tokens with small ids."""
    return [-sum(row.completion.token_ids) / len(row.completion.token_ids) / 100 for row in generations]


def config(**changes: Any) -> PPOConfig:
    settings: dict[str, Any] = {
        "steps": 4,
        "prompts_per_step": 4,
        "samples_per_prompt": 2,
        "sampling": SamplingConfig(max_tokens=6),
        "rewards": RewardsConfig(terms={"short": FunctionReward(function="tests.stages.test_ppo:short_is_good")}),
        "optimizer": OptimizerConfig(learning_rate=5e-3, schedule="constant"),
        "value_optimizer": OptimizerConfig(learning_rate=5e-3, schedule="constant"),
        "kl_coef": 0.0,
        "checkpoint_every": 1,
    }
    return PPOConfig(**(settings | changes))


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def shop_and_inputs(root: Path, policy: Path) -> tuple[Workshop, dict[str, Any]]:
    shop = Workshop(ArtifactStore(root / "store"))
    base = shop.store.external(PolicyRef, policy)
    inputs = {"policy": base, "reference": base, "prompts": prompts(shop.store, root), "reward_models": {}}
    return shop, inputs


def series(shop: Workshop, name: str) -> list[float]:
    return [values[f"ppo/{name}"] for _, values in shop.tracker.points if f"ppo/{name}" in values]


def test_prompts_come_epoch_by_epoch_each_once() -> None:
    taken = [prompt.id for step in range(5) for prompt in prompts_at(step, PROMPTS, count=2, seed=3)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == [f"p{i}" for i in range(5)]
    assert taken[:5] != taken[5:]


@pytest.mark.parametrize("advantage", ["gae", "reinforce++", "rloo", "grpo", "dr_grpo"])
def test_the_first_update_is_on_policy_and_the_reference_is_at_distance_zero(
    tmp_path: Path, policy: Path, advantage: str
) -> None:
    shop, inputs = shop_and_inputs(tmp_path, policy)
    shop.run("ppo", config(advantage=advantage, steps=2), inputs)
    assert series(shop, "policy/ratio_max")[0] == 1.0
    assert series(shop, "kl/per_sequence")[0] == 0.0
    assert series(shop, "kl/per_sequence")[1] != 0.0
    assert series(shop, "mismatch/exp_abs_log_q")[0] == pytest.approx(1.0, abs=1e-3)


def test_the_reward_rises(tmp_path: Path, policy: Path) -> None:
    shop, inputs = shop_and_inputs(tmp_path, policy)
    fast = OptimizerConfig(learning_rate=2e-2, schedule="constant")
    settings = {"advantage": "grpo", "steps": 16, "samples_per_prompt": 8, "checkpoint_every": 16, "optimizer": fast}
    shop.run("ppo", config(**settings), inputs)
    rewards = series(shop, "reward/mean")
    # uniform over 320 tokens: -1.6 at first, standard error 0.07 over 32 rollouts of 6 tokens
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2


@pytest.mark.parametrize("advantage", ["gae", "grpo"])
def test_a_killed_run_ends_with_the_same_bytes(tmp_path: Path, policy: Path, advantage: str) -> None:
    whole, inputs = shop_and_inputs(tmp_path / "whole", policy)
    expected, _ = whole.run("ppo", config(advantage=advantage, kl_target=0.5), inputs)
    killed, inputs = shop_and_inputs(tmp_path / "killed", policy)
    ref = killed_and_resumed(killed, "ppo", config(advantage=advantage, kl_target=0.5), inputs, at=3)
    assert ref.digest == expected.digest


def test_a_group_estimator_needs_a_group_and_minibatches_need_rollouts() -> None:
    with pytest.raises(ValidationError, match="samples_per_prompt = 1: grpo compares"):
        config(advantage="grpo", samples_per_prompt=1)
    with pytest.raises(ValidationError, match="minibatches = 9: must be <= the 8 rollouts"):
        config(minibatches=9)
