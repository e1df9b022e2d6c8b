"""Declare and configure selection: `select` in the sections that select."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from rlhf_core.schema.base import Config, added_option
from rlhf_core.types import ArtifactRef, RolloutsRef
from stages import measured
from stages.declaration import From, stage


class Selection(Config):
    eval_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the prompts held out as `eval.parquet`: at least one prompt unless 0."""
    drop_truncated: bool = True
    """Whether answers cut off by the token limit are left out: as text they would teach the model to end there."""


class BestOfN(Selection):
    """The best answer to each prompt."""

    type: Literal["best_of_n"] = "best_of_n"


class TopK(Selection):
    """The k best different answers to each prompt."""

    type: Literal["top_k"] = "top_k"
    k: int = Field(2, ge=1)


class Threshold(Selection):
    """All different answers with at least a given reward."""

    type: Literal["threshold"] = "threshold"
    minimum: float


class Pairs(Selection):
    """One preferred and one rejected answer per prompt; ties are dropped and counted."""

    type: Literal["pairs"] = "pairs"
    rule: Literal["max_min", "random", "max_random"] = "max_min"
    """Choice of the pair: `max_min` is best against worst, `random` two at random, `max_random` best against a random
    other."""
    margin_threshold: float = Field(0.0, ge=0)
    """Smallest margin of a pair; closer pairs are dropped and counted."""
    length_penalty: float = Field(0.0, ge=0)
    """Penalty per token, subtracted from the reward before answers are compared."""
    across: Literal["", "policies"] = added_option("")
    """`policies` pairs answers of different policies; `rollouts` of a recipe then names several steps."""
    chosen: str = added_option("")
    """Name in `rollouts` whose answers are chosen, regardless of their reward (delta learning, arXiv 2507.06187).
    `rule` chooses among the answers of each side."""
    rejected: str = added_option("")
    """Name in `rollouts` whose answers are rejected."""

    @property
    def compares_policies(self) -> bool:
        """True if both answers of a pair are from different policies."""
        return bool(self.across or self.chosen)

    @model_validator(mode="after")
    def _check_sides(self) -> Self:
        if bool(self.chosen) != bool(self.rejected):
            name = "rejected" if self.chosen else "chosen"
            raise ValueError(f'{name} = "": must name answers if the other side does; give both, or neither')
        if self.chosen and self.chosen == self.rejected:
            raise ValueError(f"rejected = {self.rejected!r}: is also chosen; name other answers")
        if self.chosen and self.margin_threshold:
            rule = "the policy decides which answer is chosen, not the reward"
            raise ValueError(f"margin_threshold = {self.margin_threshold}: {rule}; leave it at 0")
        return self


class PromptsInBand(Config):
    """The prompts that are neither too easy nor too hard for the policy, by the mean of a reward over its answers."""

    type: Literal["prompts"] = "prompts"
    term: str = ""
    """Term of the rewards whose mean counts, such as one that is 1 for a right answer; the reward itself if empty."""
    low: float = 0.1
    """Least mean of a prompt that is kept."""
    high: float = 0.9
    """Largest mean of a prompt that is kept."""
    per_source: int = Field(0, ge=0)
    """Maximum number of prompts of each source, drawn at random; 0 keeps all."""

    @model_validator(mode="after")
    def _check_band(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low = {self.low}: must be at most high = {self.high}; swap them")
        return self


SelectConfig: TypeAlias = Annotated[BestOfN | TopK | Threshold | Pairs, Field(discriminator="type")]
AnySelectConfig: TypeAlias = Annotated[BestOfN | TopK | Threshold | Pairs | PromptsInBand, Field(discriminator="type")]
"""The selections of the stage; a section that trains on the selection takes the selections of answers."""


def check_one_policy(select: BestOfN | TopK | Threshold | Pairs) -> None:
    """Raise ValueError for pairs across policies where the rollouts are of one policy."""
    if isinstance(select, Pairs) and select.compares_policies:
        key, value = ("across", select.across) if select.across else ("chosen", select.chosen)
        raise ValueError(f"select.{key} = {value!r}: a round has answers of one policy; select in a step of a recipe")


@stage(version=1, code="strict", section="rejection_sampling.select", metrics=measured.select)
def select(
    config: AnySelectConfig,
    *,
    rollouts: Annotated[RolloutsRef | None, From("score")] = None,
    pool: Annotated[Mapping[str, RolloutsRef] | None, From({})] = None,
) -> ArtifactRef:
    """Demonstrations, pairs or prompts from `rollouts`, or from the rollouts of several policies in `pool`."""
