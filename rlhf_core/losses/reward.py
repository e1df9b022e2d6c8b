"""Reward modelling: score the preferred answer higher."""

# Shape legend: B pairs of a batch.

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.losses.output import LossOutput


def bradley_terry_loss(
    chosen_B: Tensor, rejected_B: Tensor, margin_B: Tensor, *, centering_coef: float, pairs: float
) -> LossOutput:
    """Return sum of -log sigmoid(r_c - r_r - margin) + c (r_c + r_r)^2, divided by `pairs`, the pairs of the whole step.

    Bradley-Terry likelihood: arXiv 2203.02155 eq. 1; margin: Llama 2, arXiv 2307.09288 eq. 2; centering (scores are
    otherwise defined only up to a constant): arXiv 2312.09244, c = 0.01 suggested, 0 switches it off.
    `accuracy` counts r_c > r_r strictly: a model that scores everything alike has accuracy 0, not 1.
    """
    chosen_B, rejected_B = chosen_B.float(), rejected_B.float()
    difference_B = chosen_B - rejected_B
    ranking_B = -logsigmoid(difference_B - margin_B.float())
    centering_B = (chosen_B + rejected_B).square()
    loss = (ranking_B + centering_coef * centering_B).sum() / pairs
    metrics = {
        "loss": loss,
        "accuracy": (difference_B > 0).float().sum() / pairs,
        "margin": difference_B.sum() / pairs,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})
