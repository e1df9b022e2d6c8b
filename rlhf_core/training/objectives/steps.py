"""What a process reward model is trained for: the label of every step, at the step's last token."""

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
    """Binary cross-entropy of each step's score with its hard or soft label; the mean over the steps of the whole step.

    arXiv 2305.20050 (labels of people), arXiv 2312.08935 (labels from rollouts).
    """

    def denominators(self, samples: Sequence[StepSample]) -> dict[str, float]:
        """Return the judged steps."""
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
        """Return the share of `samples` in the loss; metrics `loss`, `accuracy`, `positive_fraction`."""
        batch = collate(samples, pad_id=pad_id).to(device)
        judged_BL = batch.loss_mask_BL != 0
        logits_S = step_scores(model, batch)[judged_BL]
        return step_loss(logits_S, batch.fields["labels"][judged_BL], steps=denominators["steps"])
