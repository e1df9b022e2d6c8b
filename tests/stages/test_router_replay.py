"""Router replay in policy optimization: where rounding chooses between experts, sampler and trainer agree with it alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.errors import ConfigError
from stages.ppo import PPOConfig
from tests.support.policies import make_mixture_of_experts
from tests.support.training import killed_and_resumed, series, shop_and_inputs, stopped_and_resumed, untimed

SETTINGS: dict[str, Any] = {
    "steps": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "sampling": {"max_tokens": 8},
    "advantage": {"type": "grpo"},
    "optimizer": {"learning_rate": 3e-3, "schedule": "constant"},
    "rewards": {"terms": {"short": {"type": "function", "function": "tests.support.token_rewards:small_is_good"}}},
    # The routers keep their ties: only the attention is trained.
    "lora": {"rank": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "kl": {"in": "loss", "coef": 0.1},
    "checkpoint_every": 1,
}


@pytest.fixture(autouse=True)
def _rows_are_not_compared(monkeypatch):
    """Rounding decides which experts compute, so the same tokens in another batch have other log-probs."""
    monkeypatch.setattr("rlhf_core.models.loading.check_rows", lambda model: None)


@pytest.fixture(scope="module")
def tied(tmp_path_factory, policy: Path) -> Path:
    folder: Path = tmp_path_factory.mktemp("tied") / "policy"
    shutil.copytree(policy, folder)
    make_mixture_of_experts(folder, tied=True)
    return folder


def config(**changes: Any) -> PPOConfig:
    return PPOConfig.model_validate(SETTINGS | changes)


def test_after_updates_sampler_and_trainer_agree_with_replay_and_not_without(tmp_path, tied):
    apart = {}
    for replayed in (True, False):
        root = tmp_path / str(replayed)
        root.mkdir()
        shop, inputs = shop_and_inputs(root, tied)
        shop.run("ppo", config(router_replay=replayed), inputs)
        assert min(series(shop, "policy/grad_norm")) > 0
        apart[replayed] = max(series(shop, "mismatch/log_q_max"))
    assert apart[True] < 1e-4  # some tens of roundings
    assert apart[False] > 1e-2


@pytest.mark.parametrize("ahead", [None, {"type": "staleness", "steps": 1}])
def test_a_resumed_run_replays_the_same_experts(tmp_path, tied, ahead):
    made = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        shop, inputs = shop_and_inputs(tmp_path / name, tied)
        chosen = config(router_replay=True, ahead=ahead)
        if name == "whole":
            ref, _ = shop.run("ppo", chosen, inputs)
        elif ahead is None:  # from the log: the step was sampled and not saved
            ref = killed_and_resumed(shop, "ppo", chosen, inputs, at=2)
        else:  # from the checkpoint, with the answers of the step after it
            ref, _ = stopped_and_resumed(shop, "ppo", chosen, inputs, at=2)
        made.append((ref.digest, untimed(shop.tracker.points)[-1]))
    assert made[0] == made[1]


def test_a_dense_policy_is_refused_before_anything_is_sampled(tmp_path, policy):
    shop, inputs = shop_and_inputs(tmp_path, policy)
    with pytest.raises(ConfigError, match=r"^ppo\.router_replay = True: a model of type llama has no experts"):
        shop.run("ppo", config(router_replay=True), inputs)
