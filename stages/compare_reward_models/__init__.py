"""Declare and configure the comparison of reward models on the same pairs."""

from collections.abc import Mapping
from typing import Annotated, Literal

from rlhf_core.config.data import Suite
from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import PreferencesRef, ReportRef, RewardModelRef
from stages import measured
from stages.declaration import From, stage
from stages.suites import suite_digests


class CompareRewardModelsConfig(Config):
    """The pairs on which the reward models are compared."""

    split: Literal["eval", "all"] = "eval"
    """Pairs to compare on: the held-out pairs, or all pairs, for reward models that were trained on none of them."""
    suites: dict[str, Suite] = added_option({})
    """Suites of chosen and rejected answers by name, local files, on which accuracy is reported by subset."""


@stage(
    version=1,
    code="strict",
    engines=("trainer",),
    page="online.md",
    metrics=measured.compare_reward_models,
    judges=("reward_models", "after"),
    files=suite_digests,
)
def compare_reward_models(
    config: CompareRewardModelsConfig,
    *,
    reward_models: Annotated[Mapping[str, RewardModelRef], From({"reward_model": "reward_model"})],
    preferences: Annotated[PreferencesRef, From("collect_preferences")],
) -> ReportRef:
    """Accuracy and calibration of several `reward_models` on the same `preferences`."""
