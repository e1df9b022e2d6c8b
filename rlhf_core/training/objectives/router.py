"""Add the load-balancing loss of a mixture of experts to an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.models.routing import watching
from rlhf_core.training.batching import ROWS, step_counts
from rlhf_core.training.objectives.base import TrainingObjective, total


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
