"""Add the load-balancing loss of a mixture of experts to an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.models.routing import watching
from rlhf_core.training.batching import row_count
from rlhf_core.training.objectives.base import TrainingObjective, total

ROWS = "router/rows"
"""Key of the number of token rows of the whole step in its denominators. A pair has two rows."""


@dataclass(frozen=True)
class RoutedObjective:
    """`objective` plus `coef` times the routers' balance (metric `router_aux`), averaged over the step's token rows."""

    objective: TrainingObjective
    coef: float

    def denominators(self, samples: Sequence[Any]) -> dict[str, float]:
        """Return the denominators of the objective and the number of token rows."""
        return step_counts(self.objective, samples)

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[Any],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the sum of both losses."""
        with watching() as routing:
            output = self.objective.compute(model, samples, denominators, pad_id=pad_id, device=device)
        balance = routing.total() / denominators[ROWS]
        return total(output.loss + self.coef * balance, output.metrics | {"router_aux": balance})


def step_counts(objective: Any, samples: Sequence[Any]) -> dict[str, float]:
    """Return the denominators of `objective` over a whole step, and the number of token rows for a router's balance.

    The objective's own number of token rows takes precedence, if any, because `samples` are then a part of the step.
    """
    rows = float(sum(row_count(sample) for sample in samples))
    counts: dict[str, float] = {ROWS: rows, **objective.denominators(samples)}
    return counts
