"""Store rollouts on disk: those scored since a checkpoint, which a resumed run reuses, and those not trained on yet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.data.shards import (
    read_generations,
    read_index,
    read_rollouts,
    write_generations,
    write_index,
    write_rollouts,
)
from rlhf_core.store.layout import remove_tree
from rlhf_core.types import Generation, Rollout

POOL = "pool"


@dataclass(frozen=True)
class Pool:
    """The partial rollouts of groups that were started but not used for a step yet, by group, oldest group first.

    `begun` is the number of all groups that were ever started.
    """

    begun: int = 0
    samples: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """The unscored generations that the policy with this digest sampled for a step, and the pool after it."""

    policy: str
    generations: list[Generation]
    pool: Pool = Pool()


@dataclass(frozen=True)
class ScoredStep:
    """The rollouts of one step, the scorer's state (running statistics) after it, and the pool after its sampling."""

    rollouts: list[Rollout]
    scorer: dict[str, Any]
    pool: Pool = Pool()


class RolloutLog:
    """A log with one folder per step below `folder`. A step is valid only for the policy digest that made it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, step: int, *, policy: str) -> ScoredStep | None:
        """Return what the policy with this digest made for `step`, or None if there is nothing."""
        folder = self._of(step)
        if not folder.is_dir():
            return None
        index = read_index(folder)
        if index["policy"] != policy:
            return None
        return ScoredStep(read_rollouts(folder), index["scorer"], read_pool(folder / POOL))

    def write(
        self, step: int, rollouts: Sequence[Rollout], scorer: dict[str, Any], *, policy: str, pool: Pool = Pool()
    ) -> None:
        """Write a step atomically."""
        final = self._of(step)
        temporary = final.with_name(f".{final.name}")
        for stale in (temporary, final):
            remove_tree(stale)
        write_rollouts(temporary, 0, rollouts)
        write_pool(temporary / POOL, pool)
        write_index(temporary, {"policy": policy, "scorer": scorer})
        temporary.rename(final)

    def forget(self, *, before: int) -> None:
        """Remove the steps below `before`."""
        for folder in self._folder.glob("step-*"):
            if _step(folder) < before:
                remove_tree(folder)

    def _of(self, step: int) -> Path:
        return _folder_of(self._folder, step)


def write_drawn(folder: Path, drawn: dict[int, Drawn]) -> None:
    """Write the generations sampled for several steps to `folder`, as a part of a checkpoint."""
    for step, one in drawn.items():
        write_generations(_folder_of(folder, step), 0, one.generations)
        write_pool(_folder_of(folder, step) / POOL, one.pool)
        write_index(_folder_of(folder, step), {"policy": one.policy})


def read_drawn(folder: Path) -> dict[int, Drawn]:
    """Return what `write_drawn` wrote, by step, in ascending order."""
    return {
        _step(one): Drawn(read_index(one)["policy"], read_generations(one), read_pool(one / POOL))
        for one in sorted(folder.glob("step-*"))
    }


def write_pool(folder: Path, pool: Pool) -> None:
    """Write a pool. A pool in which no group was ever started writes no folder."""
    if pool.begun:
        write_generations(folder, 0, pool.samples)
        write_index(folder, {"begun": pool.begun})


def read_pool(folder: Path) -> Pool:
    """Return what `write_pool` wrote."""
    return Pool(read_index(folder)["begun"], tuple(read_generations(folder))) if folder.is_dir() else Pool()


def _folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def _step(folder: Path) -> int:
    return int(re.sub(r"\D", "", folder.name))
