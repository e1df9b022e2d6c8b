"""Remember the best evaluation, and for how many evaluations there was no better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class Best:
    """The best value so far, its step (-1 before the first), and the number of evaluations since.

    >>> Best().after(0, 1.5).after(10, 2.0).after(20, 1.9)
    Best(value=2.0, step=10, since=1)
    """

    value: float = -math.inf
    step: int = -1
    since: int = 0

    def after(self, step: int, value: float) -> Self:
        """Return the best after another evaluation; a value that is not a number is no better than any other."""
        if value > self.value:
            return replace(self, value=value, step=step, since=0)
        return replace(self, since=self.since + 1)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must keep (JSON)."""
        return asdict(self) | {"value": self.value if self.step >= 0 else None}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Self:
        """Return what `state` was called on."""
        return cls(since=state["since"]) if state["step"] < 0 else cls(**state)
