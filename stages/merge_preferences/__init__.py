"""Declare and configure the union of several sets of preference pairs."""

from collections.abc import Mapping
from typing import Annotated

from rlhf_core.schema.base import Config
from rlhf_core.types import PreferencesRef
from stages import measured
from stages.declaration import From, stage


class MergePreferencesConfig(Config):
    """The union of preference pairs; it has no options."""


@stage(
    version=1,
    code="strict",
    page="online.md",
    metrics=measured.fixed(*measured.SPLITS, "moved", "duplicates"),
)
def merge_preferences(
    config: MergePreferencesConfig,
    *,
    preferences: Annotated[
        Mapping[str, PreferencesRef], From({"prepared": "prepare_data.preferences", "collected": "collect_preferences"})
    ],
) -> PreferencesRef:
    """The union of several sets of `preferences`."""
