"""Declare and configure the collection of judgments: `collect` in the sections that collect."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.annotators import Annotator, JudgeAnnotator
from rlhf_core.schema.base import OPERATIONAL, Config
from rlhf_core.types import ComparisonsRef, PreferencesRef
from stages import measured
from stages.declaration import From, stage
from stages.rubrics import rubric_digest

RUBRIC = "annotator.rubric_file"
"""Name of the judge's rubric among the files in the stage's key."""


class CollectPreferencesConfig(Config):
    """The annotators of the comparisons, and the rule that turns judgments into pairs."""

    annotator: Annotator
    eval_fraction: float = Field(0.1, ge=0, lt=1)
    """Share of the prompts held out as `eval.parquet`: at least one prompt unless 0."""
    several: Literal["most", "unanimous"] = "most"
    """Chosen side of a comparison that several annotators judged: the side that more of them chose (`most`), or only a
    side that all of them chose (`unanimous`). A comparison without such a side is dropped and counted, as ties are."""
    min_attention: float = Field(0.0, ge=0, le=1)
    """Share of the attention checks that an annotator must pass; the judgments of others are dropped and counted."""
    gold: Annotated[str, OPERATIONAL] = ""  # in the key by its code, as every function is, and not if there is none
    """Known reward, `module:function` or `file.py:function`, for the share of judgments that agree with it in the
    report. Annotators do not see it."""


def content_digests(config: CollectPreferencesConfig) -> dict[str, str]:
    """Digest of the judge's rubric, if the rubric is a file. Raises ConfigError if that file is missing."""
    judge = config.annotator
    return rubric_digest(judge, RUBRIC, under="collect") if isinstance(judge, JudgeAnnotator) else {}


@stage(
    version=1,
    code="warn",
    section="online.collect",
    page="online.md",
    metrics=measured.collect_preferences,
    files=content_digests,
)
def collect_preferences(
    config: CollectPreferencesConfig, *, comparisons: Annotated[ComparisonsRef, From("propose_comparisons")]
) -> PreferencesRef:
    """Preference pairs from annotators who judge `comparisons`."""
