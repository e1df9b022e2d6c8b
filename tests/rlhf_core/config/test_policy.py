"""The policy section of a profile: choices by name, and combinations that would quietly do something else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config.base import keyed
from rlhf_core.config.policy import (
    GROUP_ADVANTAGES,
    CISPOLoss,
    ClipLoss,
    GAEAdvantage,
    GRPOAdvantage,
    GSPOLoss,
    PPOConfig,
)


def test_the_default_is_ppo() -> None:
    config = PPOConfig()
    assert (config.advantage, config.loss) == (GAEAdvantage(gae_lambda=0.95, whiten=True), ClipLoss(clip_low=0.2))


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_a_bare_name_stands_for_its_defaults(name: str) -> None:
    assert PPOConfig(loss=name).loss == {"clip": ClipLoss(), "gspo": GSPOLoss(), "cispo": CISPOLoss()}[name]  # type: ignore[arg-type]
    assert keyed(PPOConfig(loss=name))["loss"]["type"] == name  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", GROUP_ADVANTAGES)
def test_estimators_that_compare_samples_need_two_of_them(kind: Any) -> None:
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 1: .* compares the samples of a prompt"):
        PPOConfig(advantage=kind(), kl_in="loss")
    assert PPOConfig(advantage=kind(), kl_in="loss", samples_per_prompt=2).advantage == kind()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"advantage": "gea"}, "'gae', 'reinforce\\+\\+'"),
        ({"advantage": {"type": "rloo", "gamma": 0.9}, "samples_per_prompt": 2}, "Extra inputs"),
        ({"correction": {"pi_old": "sampler"}}, "level = 'token': with pi_old = 'sampler' q is 1 everywhere"),
        ({"dynamic_sampling": {}}, "samples_per_prompt = 1: dynamic_sampling compares"),
        ({"dynamic_sampling": {"max_rounds": 1}, "samples_per_prompt": 2}, "greater than or equal to 2"),
        ({"ptx": {"coef": 0}}, "greater than 0"),
        ({"value_optimizer": {"ema_decay": 0.9}}, "nobody uses the average of a value model"),
        (
            {
                "dynamic_sampling": {"low": 0.1},
                "samples_per_prompt": 2,
                "rewards": {"normalise": "running"},
            },
            "rewards.normalise = 'running' moves it",
        ),
        ({"advantage": "grpo", "samples_per_prompt": 2}, "kl_in = 'reward': grpo divides"),
    ],
)
def test_a_section_that_cannot_work_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PPOConfig.model_validate(section)


def test_grpo_is_chosen_with_its_own_option() -> None:
    section = {"advantage": {"type": "grpo", "eps": 1e-4}, "samples_per_prompt": 8, "kl_in": "loss"}
    assert PPOConfig.model_validate(section).advantage == GRPOAdvantage(eps=1e-4)
