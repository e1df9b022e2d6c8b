"""Configure the collection of judgments: `collect` in the sections that collect."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config.annotators import Annotator
from rlhf_core.schema.base import Config


class CollectPreferencesConfig(Config):
    """Who judges the comparisons, and how judgments become pairs."""

    annotator: Annotator
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the prompts held out as `eval.parquet`: at least one prompt unless 0."""
    several: Literal["most", "unanimous"] = "most"
    """Pair of a comparison that several annotators judged: the side that more of them chose, or only if all chose it. A
    comparison without such a side is dropped and counted, as ties are."""
    min_attention: float = Field(0.0, ge=0, le=1)
    """Share of the attention checks that an annotator must pass; the judgments of others are dropped and counted."""
