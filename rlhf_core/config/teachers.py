"""Configure teachers: `teachers` and `route` of `[distill]`, and `[ppo.distill]`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from rlhf_core.errors import ConfigError, nearest
from rlhf_core.schema.base import Config

TeacherName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
Weight = Annotated[float, Field(ge=0)]


class TeacherOptions(Config):
    """Policies that teach, by name: the checks of the options `teachers` and `route`."""

    if TYPE_CHECKING:
        teachers: dict[TeacherName, Weight]
        route: dict[TeacherName, tuple[str, ...]]

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.teachers and not sum(self.teachers.values()) > 0:
            raise ValueError(
                f"teachers = {toml(self.teachers)}: the weights add up to 0; give one of them a positive weight"
            )
        if not math.isfinite(sum(self.teachers.values())):
            raise ValueError(
                f"teachers = {toml(self.teachers)}: the sum of the weights is too large; give smaller ones"
            )
        return self

    @model_validator(mode="after")
    def _check_route(self) -> Self:
        if not self.route:
            return self
        for name in sorted(self.route.keys() ^ self.teachers.keys()):
            rule = "is no teacher; add teachers." if name in self.route else "has no sources; add route."
            raise ValueError(f"route.{name}: {rule}{name}")
        if len(set(self.teachers.values())) > 1:
            raise ValueError(
                f"teachers = {toml(self.teachers)}: with route a prompt has one teacher; give equal weights"
            )
        sources = [source for named in self.route.values() for source in named]
        for source in sources:
            if sources.count(source) > 1:
                raise ValueError(
                    f"route = {{...}}: {source!r} has {sources.count(source)} teachers; leave it to one of them"
                )
        return self

    def check_sources(self, sources: Collection[str], *, known: Collection[str] = (), key: str) -> None:
        """Raise ConfigError for one of `sources` without a teacher, and for a source of `route` that is not `known`.

        `known` are all sources of the prompts, if they are more than the taught ones.
        """
        taught = {source for named in self.route.values() for source in named}
        for source in sorted(set(sources) - taught) if self.route else ():
            rule, remedy = (
                "no teacher teaches prompts of this source",
                "add it to one of them, or leave it out of the data",
            )
            raise ConfigError(f"{key}.route", source, rule, remedy)
        for name, named in self.route.items():
            for source in named:
                if source not in {*sources, *known}:
                    rule = f"no prompt has the source {source!r}; {nearest(source, sorted({*sources, *known}))}"
                    raise ConfigError(f"{key}.route.{name} = {list(named)}: {rule}")


def toml(table: Mapping[str, float]) -> str:
    """Format a table as in a profile.

    >>> toml({"sft": 1.0})
    '{sft = 1.0}'
    """
    return "{" + ", ".join(f"{name} = {value}" for name, value in table.items()) + "}"


class PolicyDistillation(TeacherOptions):
    """On-policy distillation: the advantage of a token is log pi_teacher - log pi_old, minus the reverse KL's k1."""

    teachers: dict[TeacherName, Weight] = Field(min_length=1)
    """Weights of the teachers by name; they are divided by their sum, and 0 only measures."""
    route: dict[TeacherName, tuple[str, ...]] = {}
    """Sources of the prompts that each teacher teaches alone, as in `[distill]`."""
    reward_weight: float = Field(0.0, ge=0)
    """Weight of the rewards' advantages, which are added to the teachers' advantages. With 0 the rewards are only
    measured, and may be left out."""
