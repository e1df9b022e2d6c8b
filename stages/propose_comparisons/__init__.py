"""Declare and configure the choice of answer pairs for annotators."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.schema.base import Config
from rlhf_core.types import ComparisonsRef, RolloutsRef
from stages import measured
from stages.declaration import From, stage


class ProposeComparisonsConfig(Config):
    """The choice of the pairs, and the comparisons that check the annotators."""

    strategy: Literal["random", "margin", "disagreement"] = "random"
    """Order of the pairs: `margin` takes the closest rewards first, `disagreement` the pairs over whose order the
    components of the reward disagree most."""
    budget: int = Field(100, ge=1)
    """Maximum number of different pairs, over all prompts."""
    pairs_per_prompt: int = Field(1, ge=1)
    """Maximum number of pairs of one prompt."""
    drop_truncated: bool = True
    """Whether answers cut off by the token limit are left out."""
    repeat_fraction: float = Field(0.1, ge=0, le=1)
    """Share of the pairs that are shown a second time with the sides swapped, to measure self-consistency."""
    attention_fraction: float = Field(0.05, ge=0, le=1)
    """Number of attention checks as a share of the pairs: an answer next to the answer to another prompt."""


@stage(
    version=1,
    code="strict",
    section="online.propose",
    page="online.md",
    metrics=measured.propose_comparisons,
)
def propose_comparisons(
    config: ProposeComparisonsConfig, *, rollouts: Annotated[Mapping[str, RolloutsRef], From({"policy": "score"})]
) -> ComparisonsRef:
    """The pairs among the answers in `rollouts` that are worth a judgment."""
