"""Check `export_every`, the interval of policies that a training exports on its way."""

from collections.abc import Mapping
from typing import Any


def check_exports(every: int, end: Mapping[str, int]) -> None:
    """Raise ValueError for policies on the way of which there are none before the `end`, the name and number of the last step."""
    for name, last in end.items():
        if every >= last:
            raise ValueError(
                f"export_every = {every}: there is no such step before the end ({name} = {last}); lower it, or leave it at 0"
            )


def steps_exported(every: int, last: int) -> tuple[int, ...]:
    """The steps after which a training of `last` steps exports its model, without the last one."""
    return tuple(range(every, last, every)) if every else ()


def check_loop_exports(every: int, max_steps: int) -> None:
    """Raise ValueError for models that are exported on the way where the number of steps depends on the data."""
    if every and not max_steps:
        raise ValueError(
            f"export_every = {every}: the policies are named by their steps, whose number depends on the data; "
            "set loop.max_steps, or leave it at 0"
        )
    check_exports(every, {"loop.max_steps": max_steps} if every else {})


def refuse_exports(trainings: Mapping[str, Any]) -> None:
    """Raise ValueError for a training inside of a group of stages that exports policies on the way, which no stage would read."""
    for key, config in trainings.items():
        if config is not None and config.export_every:
            raise ValueError(
                f"{key}.export_every = {config.export_every}: no stage reads policies on the way of this training; leave it at "
                "0, or train in a step of its own"
            )
