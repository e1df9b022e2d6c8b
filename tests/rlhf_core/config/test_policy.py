"""The policy section of a profile: choices by name, and combinations that would quietly do something else."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.algorithms.advantage.group import CustomAdvantage, GRPOAdvantage
from rlhf_core.algorithms.advantage.token import GAEAdvantage
from rlhf_core.algorithms.policy.clip import ClipLoss, GSPOLoss
from rlhf_core.algorithms.policy.weighted import CISPOLoss
from rlhf_core.config.policy import GROUP_ADVANTAGES, PPOConfig
from rlhf_core.schema.base import keyed

RELATIVE = {"type": "function", "function": "a.b:c", "compares": "group"}


def test_the_default_is_ppo() -> None:
    config = PPOConfig()
    assert (config.advantage, config.loss) == (GAEAdvantage(gae_lambda=0.95, whiten=True), ClipLoss(clip_low=0.2))


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo"])
def test_a_bare_name_stands_for_its_defaults(name: str) -> None:
    assert PPOConfig(loss=name).loss == {"clip": ClipLoss(), "gspo": GSPOLoss(), "cispo": CISPOLoss()}[name]  # type: ignore[arg-type]
    assert keyed(PPOConfig(loss=name))["loss"]["type"] == name  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [kind for kind in GROUP_ADVANTAGES if kind is not CustomAdvantage])
def test_estimators_that_compare_samples_need_two_of_them(kind: Any) -> None:
    with pytest.raises(ValidationError, match=r"samples_per_prompt = 1: .* compares the samples of a prompt"):
        PPOConfig(advantage=kind(), kl_in="loss")
    enough = kind().least_group
    assert PPOConfig(advantage=kind(), kl_in="loss", samples_per_prompt=enough).advantage == kind()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"advantage": "gea"}, "'gae', 'reinforce\\+\\+'"),
        ({"advantage": {"type": "rloo", "gamma": 0.9}, "samples_per_prompt": 2}, "Extra inputs"),
        ({"correction": {"pi_old": "sampler"}}, "level = 'token': with pi_old = 'sampler' the ratio q is 1 everywhere"),
        ({"dynamic_sampling": {}}, "samples_per_prompt = 1: dynamic_sampling compares"),
        ({"rewards": {"composition": {"type": "gdpo"}}}, 'samples_per_prompt = 1: rewards.composition.type = "gdpo"'),
        (
            {"rewards": {"terms": {"rm": {"type": "reward_model", "normalise": "group"}}}},
            'samples_per_prompt = 1: rewards.terms.rm.normalise = "group" compares',
        ),
        ({"dynamic_sampling": {"max_rounds": 1}, "samples_per_prompt": 2}, "greater than or equal to 2"),
        ({"ptx": {"coef": 0}}, "greater than 0"),
        ({"value_optimizer": {"ema_decay": 0.9}}, "the average of a value model is not used"),
        (
            {
                "dynamic_sampling": {"low": 0.1},
                "samples_per_prompt": 2,
                "rewards": {"normalise": "running"},
            },
            "rewards.normalise = 'running' changes it",
        ),
        (
            {
                "dynamic_sampling": {"high": 0.9},
                "samples_per_prompt": 2,
                "rewards": {"composition": {"type": "gdpo"}},
            },
            "rewards.composition.type = 'gdpo' changes it",
        ),
        (
            {
                "dynamic_sampling": {"low": 0.1},
                "samples_per_prompt": 2,
                "rewards": {"terms": {"rm": {"type": "reward_model", "normalise": "group"}}},
            },
            "rewards.terms.rm.normalise = 'group' changes it",
        ),
        (
            {"rewards": {"terms": {"won": {"type": "episode"}}}},
            "rewards.terms.won.type = 'episode': only agent episodes have this reward",
        ),
        ({"advantage": "grpo", "samples_per_prompt": 2}, "kl_in = 'reward': grpo divides"),
        (
            {"kl_credit": "answer"},
            r"kl_credit = 'answer': .*advantage is gae and kl_in 'reward'; set kl_credit = \"token\"",
        ),
        (
            {"advantage": "rloo", "samples_per_prompt": 2, "kl_in": "loss", "kl_credit": "answer"},
            "kl_credit = 'answer': .*kl_in 'loss'",
        ),
        ({"kl_coef": 0.0, "kl_target": 6.0}, r"kl_target = 6\.0: .* kl_coef = 0 stays 0; raise kl_coef"),
        ({"kl_target": 6.0, "kl_horizon": 12}, "kl_horizon = 12: must be > a fifth of the 64 rollouts of a step"),
        ({"advantage": "remax", "staleness": 1}, "advantage = 'remax': .* and staleness is not made for it"),
        (
            {"advantage": "remax", "rewards": {"normalise": "running"}},
            "rewards.normalise = 'running' scales rewards by the answers around them",
        ),
        (
            {"advantage": "remax", "rewards": {"terms": {"won": RELATIVE}}},
            "rewards.terms.won.compares = 'group' makes them relative to the answers around them",
        ),
        ({"reference_sync": {"every": 2}, "kl_coef": 0.0}, "reference_sync: .* kl_coef = 0 loads none"),
        (
            {"reference_sync": {"every": 2}, "optimizer": {"ema_decay": 0.9}},
            "reference_sync: .* the average of the policy",
        ),
        ({"kl_estimator": "k3"}, "kl_estimator = 'k3': applies to a penalty in the loss"),
        ({"staleness": 5}, "less than or equal to 4"),
        ({"staleness": 3, "steps": 3}, "staleness = 3: must be < steps = 3"),
        (
            {"staleness": 2, "correction": {"level": "off"}},
            "staleness = 2: answers sampled by weights that old need the correction",
        ),
        (
            {"partial_tokens": 16, "correction": {"level": "off", "pi_old": "sampler"}},
            'partial_tokens = 16: .*; set correction.pi_old = "trainer"',
        ),
        (
            {"staleness": 1, "dynamic_sampling": {}, "samples_per_prompt": 2},
            "staleness = 1: dynamic_sampling samples again",
        ),
        (
            {"partial_tokens": 16, "dynamic_sampling": {}, "samples_per_prompt": 2},
            "partial_tokens = 16: dynamic_sampling samples again",
        ),
        ({"partial_tokens": 24}, "partial_tokens = 24: must divide sampling.max_tokens = 64"),
        ({"partial_tokens": 64}, "partial_tokens = 64: .* two rounds or more"),
        ({"in_flight_groups": 64}, "in_flight_groups = 64: without partial_tokens"),
        ({"partial_tokens": 16, "in_flight_groups": 63}, "in_flight_groups = 63: must be >= prompts_per_step = 64"),
        (
            {"partial_tokens": 16, "agent": {"type": "environment", "environment": "my.module:Game"}},
            "partial_tokens = 16: the episodes of an agent cannot be carried over",
        ),
    ],
)
def test_a_section_that_cannot_work_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PPOConfig.model_validate(section)


def test_bounds_go_with_a_term_that_is_normalised_and_only_watched() -> None:
    watched = {"type": "reward_model", "weight": 0.0, "normalise": "running"}
    rewards = {"terms": {"rm": {"type": "reward_model"}, "watched": watched}}
    section = {"dynamic_sampling": {"low": 0.1}, "samples_per_prompt": 2, "rewards": rewards}
    assert PPOConfig.model_validate(section).rewards.terms["watched"].weight == 0.0


def test_grpo_is_chosen_with_its_own_option() -> None:
    section = {"advantage": {"type": "grpo", "eps": 1e-4}, "samples_per_prompt": 8, "kl_in": "loss"}
    assert PPOConfig.model_validate(section).advantage == GRPOAdvantage(eps=1e-4)


def test_old_answers_need_no_correction_one_step_off_and_the_pool_is_twice_a_step() -> None:
    assert PPOConfig.model_validate({"staleness": 1, "correction": {"level": "off"}}).staleness == 1
    assert PPOConfig(partial_tokens=16).groups_in_flight == 128
    assert PPOConfig(partial_tokens=16, in_flight_groups=70).groups_in_flight == 70


def test_later_options_are_not_in_the_keys_of_profiles_without_them() -> None:
    found = keyed(PPOConfig(advantage="grpo", samples_per_prompt=2, kl_in="loss"))  # type: ignore[arg-type]
    assert not {"kl_estimator", "truncated_answers"} & set(found)
    assert found["advantage"] == {"type": "grpo", "eps": 1e-6}
    assert "truncated" not in found["rewards"] and "token_cap" not in found["correction"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"monitors": [{"type": "band", "metric": "rolout/length", "low": 1}]}, "no step has such a metric; did you mean rollout/length"),
        ({"monitors": [{"type": "drift", "metric": "kl/k4", "low": 1}]}, "did you mean kl/k3"),
        ({"monitors": [{"type": "band", "metric": "reward_component/rewardmodel", "low": 1}]}, "mean reward_component/reward_model"),
        ({"monitors": [{"type": "band", "metric": "eval/reward/men", "low": 1}], "evaluate": {}}, "did you mean eval/reward/mean"),
        ({"evaluate": {"metric": "eval/reward/men"}}, "evaluate.metric = 'eval/reward/men': .* did you mean eval/reward/mean"),
        ({"evaluate": {"metric": "reward/mean"}}, "evaluations have no such metric; did you mean eval/reward/mean"),
    ],
)  # fmt: skip
def test_a_metric_that_no_step_or_evaluation_has_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PPOConfig.model_validate(section)


@pytest.mark.parametrize(
    "metric",
    ["reward_extra/any/thing", "reward_constant/reward_model", "reward_failed/reward_model", "policy/clip_fraction"],
)
def test_a_metric_that_a_step_may_have_is_watched(metric: str) -> None:
    section = {"monitors": [{"type": "band", "metric": metric, "low": 1}]}
    assert PPOConfig.model_validate(section).monitors[0].reads() == (metric,)
