"""Options of the sampling and of the data that change during a policy optimization."""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from rlhf_core.config.engines import SamplingConfig
from rlhf_core.schema.base import Config

Shares = dict[str, Annotated[float, Field(ge=0)]]


class ScheduledSampling(Config):
    """Options of the sampling that change."""

    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, gt=0)


class SchedulePart(Config):
    """Options from the end of the part before. Options that are not given stay."""

    steps: int = Field(ge=1)
    """Number of steps of this part. The last part lasts until the end of the training."""
    mixture: Shares = {}
    """Share of the prompts of each step by their source, as `ppo.mixture`. A new mixture begins with a new order of prompts."""
    sampling: ScheduledSampling = ScheduledSampling()


class Scheduled(NamedTuple):
    """The options of one step."""

    sampling: SamplingConfig
    mixture: Mapping[str, float]
    since: int = 0
    """The first step with this mixture."""


def check_parts(schedule: Sequence[SchedulePart], steps: int) -> None:
    """Raise ValueError if a part begins after the last of `steps`."""
    begin = sum(part.steps for part in schedule[:-1])
    if begin >= steps:
        rule = f"its last part begins after {begin} steps, and there are {steps}; raise steps, or shorten the parts"
        raise ValueError(f"schedule = [...]: {rule}")


def scheduled(
    schedule: Sequence[SchedulePart], step: int, sampling: SamplingConfig, mixture: Mapping[str, float]
) -> Scheduled:
    """The options of `step`, where `sampling` and `mixture` apply before the first part.

    >>> parts = [SchedulePart(steps=2, sampling={"max_tokens": 8}), SchedulePart(steps=1, mixture={"sums": 1.0})]
    >>> [scheduled(parts, step, SamplingConfig(), {}).sampling.max_tokens for step in (1, 2)]
    [8, 8]
    >>> [scheduled(parts, step, SamplingConfig(), {}).mixture for step in (1, 2, 9)]
    [{}, {'sums': 1.0}, {'sums': 1.0}]
    """
    begin = since = 0
    for part in schedule:
        if step < begin:
            break
        sampling = sampling.model_copy(update={name: value for name, value in part.sampling if value is not None})
        if part.mixture:
            mixture, since = part.mixture, begin
        begin += part.steps
    return Scheduled(sampling, mixture, since)
