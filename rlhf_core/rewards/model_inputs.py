"""Check that a stage was given the reward models that its rewards name. Planning does this, so nothing slow is imported."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from rlhf_core.config.rewards import (
    EnsembleReward,
    ProcessRewardModelReward,
    RewardModelReward,
    RewardsConfig,
    RewardSpec,
)
from rlhf_core.errors import ConfigError, explain
from rlhf_core.types import ProcessRewardModelRef, RewardModelRef


def check_reward_models(config: RewardsConfig, reward_models: Mapping[str, RewardModelRef]) -> None:
    """Raise ConfigError when a term names a reward model that is not among the inputs, or one that judges steps."""
    for name, spec in config.terms.items():
        for key, model in _models_of(spec):
            if model not in reward_models:
                near = difflib.get_close_matches(model, reward_models, n=1)
                given = f"did you mean {near[0]}?" if near else f"the stage has {sorted(reward_models) or 'none'}"
                rule = "the stage was not given this reward model"
                raise ConfigError(explain(f"rewards.terms.{name}.{key}", model, rule, given))
            steps = isinstance(reward_models[model], ProcessRewardModelRef)
            if steps and not isinstance(spec, ProcessRewardModelReward):
                rule, remedy = "it scores steps, not whole answers", 'set type = "process_reward_model"'
                raise ConfigError(explain(f"rewards.terms.{name}.{key}", model, rule, remedy))


def _models_of(spec: RewardSpec) -> list[tuple[str, str]]:
    """Return key -> name of the reward models that a term asks for."""
    match spec:
        case RewardModelReward() | ProcessRewardModelReward():
            return [("model", spec.model)]
        case EnsembleReward():
            return [(f"models[{index}]", model) for index, model in enumerate(spec.models)]
        case _:
            return []
