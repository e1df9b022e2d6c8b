"""Rollouts that were made but not yet trained on past a checkpoint: a resumed run takes them instead of sampling again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.data.shards import read_index, read_rollouts, write_index, write_rollouts
from rlhf_core.store_layout import remove_tree
from rlhf_core.types import Rollout


@dataclass(frozen=True)
class ScoredStep:
    """The rollouts of one step, and the scorer's state (running statistics) after it."""

    rollouts: list[Rollout]
    scorer: dict[str, Any]


class RolloutLog:
    """One folder a step below `folder`. A step counts only for the very policy that made it, told by its digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, step: int, *, policy: str) -> ScoredStep | None:
        """Return what the policy with this digest made at `step`; None if that is not there."""
        folder = self._of(step)
        if not folder.is_dir():
            return None
        index = read_index(folder)
        return ScoredStep(read_rollouts(folder), index["scorer"]) if index["policy"] == policy else None

    def write(self, step: int, rollouts: Sequence[Rollout], scorer: dict[str, Any], *, policy: str) -> None:
        """Keep a step, whole or not at all."""
        final = self._of(step)
        temporary = final.with_name(f".{final.name}")
        for stale in (temporary, final):
            remove_tree(stale)
        write_rollouts(temporary, 0, rollouts)
        write_index(temporary, {"policy": policy, "scorer": scorer})
        temporary.rename(final)

    def forget(self, *, before: int) -> None:
        """Remove the steps below `before`."""
        for folder in self._folder.glob("step-*"):
            if int(re.sub(r"\D", "", folder.name)) < before:
                remove_tree(folder)

    def _of(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"
