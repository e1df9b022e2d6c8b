"""Define the objective of process reward models, which predict the label of every step at its last token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.process_reward import step_loss
from rlhf_core.models.batches import collate
from rlhf_core.models.forward import step_scores
from rlhf_core.types import StepSample


@dataclass(frozen=True)
class StepObjective:
    """The binary cross-entropy of each answer step's score with its hard or soft label.

    The loss is the mean over the answer steps of the optimizer step. See arXiv 2305.20050 (human labels) and arXiv
    2312.08935 (labels from rollouts).
    """

    def denominators(self, samples: Sequence[StepSample]) -> dict[str, float]:
        """Return the number of judged steps."""
        return {"steps": float(sum(sum(sample.loss_mask) for sample in samples))}

    def compute(
        self,
        model: nn.Module,
        samples: Sequence[StepSample],
        denominators: Mapping[str, float],
        *,
        pad_id: int,
        device: torch.device,
    ) -> LossOutput:
        """Return the share of `samples` in the loss, with the metrics `loss`, `accuracy` and `positive_fraction`."""
        batch = collate(samples, pad_id=pad_id).to(device)
        judged_BL = batch.loss_mask_BL != 0
        logits_S = step_scores(model, batch)[judged_BL]
        return step_loss(logits_S, batch.fields["labels"][judged_BL], steps=denominators["steps"])
