"""Reward modelling: score the preferred answer higher; one score from an ensemble's many."""

# Shape legend: B pairs or rows of a batch, M models of an ensemble. Tensors are [B] unless said.

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import at_least_fp32

EnsembleReduction: TypeAlias = Literal["mean", "min", "mean_minus_std"]


def bradley_terry_loss(
    chosen_scores: Tensor,
    rejected_scores: Tensor,
    *,
    margin: Tensor | float = 0.0,
    center_coef: float = 0.0,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -log sigmoid(r_c - r_r - margin) + c (r_c + r_r)^2, over `pairs`, the pairs of the whole step.

    Bradley-Terry likelihood: arXiv 2203.02155 eq. 1; margin: Llama 2, arXiv 2307.09288 eq. 2; centering (scores are
    otherwise defined only up to a constant): arXiv 2312.09244, c = 0.01 suggested, 0 switches it off. `pairs` None says
    that this call is the whole step. `accuracy` counts r_c > r_r strictly: a model that scores everything alike has
    accuracy 0, not 1.
    """
    chosen_B, rejected_B = at_least_fp32(chosen_scores), at_least_fp32(rejected_scores)
    count = float(len(chosen_B)) if pairs is None else pairs
    difference_B = chosen_B - rejected_B
    ranking_B = -torch.nn.functional.logsigmoid(difference_B - margin)
    centering_B = (chosen_B + rejected_B).square()
    loss = (ranking_B + center_coef * centering_B).sum() / count
    metrics = {
        "loss": loss,
        "accuracy": (difference_B > 0).float().sum() / count,
        "margin": difference_B.sum() / count,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def ensemble_score(scores_MB: Tensor, *, reduce: EnsembleReduction, k: float = 1.0) -> Tensor:
    """Return one score [B] per row from those of M reward models [M, B].

    `min` is worst-case optimization and `mean_minus_std`, mean - `k` std, a form of uncertainty-weighted optimization
    (arXiv 2310.02743, which subtracts the variance). The standard deviation is the population's: 0 for one
    model.
    """
    scores_MB = at_least_fp32(scores_MB)
    match reduce:
        case "mean":
            return scores_MB.mean(dim=0)
        case "min":
            return scores_MB.amin(dim=0)
        case "mean_minus_std":
            return scores_MB.mean(dim=0) - k * scores_MB.std(dim=0, correction=0)
        case _:
            assert_never(reduce)
