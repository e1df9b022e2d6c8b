"""Check `export_every`, the number of steps after which a training exports its current policy."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from rlhf_core.schema.base import Config


class ExportingConfig(Config):
    """A training whose loop may export intermediate models."""

    if TYPE_CHECKING:  # fields of each training, which orders them differently
        export_every: int
        loop: Any

    @property
    def exported_steps(self) -> tuple[int, ...]:
        """The steps after which the model is exported, without the last one."""
        return steps_exported(self.export_every, self.loop.max_steps)

    @model_validator(mode="after")
    def _check_exports(self) -> Self:
        """Raise ValueError for models that are exported during training if the number of steps depends on the data."""
        if self.export_every:
            if not self.loop.max_steps:
                raise ValueError(
                    f"export_every = {self.export_every}: the policies are named by their steps, whose number depends on the "
                    "data; set loop.max_steps, or leave it at 0"
                )
            check_exports(self.export_every, "loop.max_steps", self.loop.max_steps)
        return self


def check_exports(every: int, name: str, last: int) -> None:
    """Raise ValueError if no policy is exported before the `last` step; the option `name` sets the number of steps."""
    if every >= last:
        raise ValueError(
            f"export_every = {every}: there is no such step before the end ({name} = {last}); lower it, or leave it at 0"
        )


def steps_exported(every: int, last: int) -> tuple[int, ...]:
    """The steps after which a training of `last` steps exports its model, without the last one."""
    return tuple(range(every, last, every)) if every else ()


def refuse_exports(trainings: Mapping[str, Any]) -> None:
    """Raise ValueError if a training in a group of stages exports intermediate policies, which no stage would read."""
    for key, config in trainings.items():
        if config is not None and config.export_every:
            raise ValueError(
                f"{key}.export_every = {config.export_every}: no stage reads policies on the way of this training; leave it at "
                "0, or train in a step of its own"
            )
