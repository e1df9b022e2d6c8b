"""Geometric-mean policy optimization: the ratio of a row is the geometric mean of its tokens' clipped ratios.

Formula: -w s A, s = exp(mean of c over the row), c = min(log rho, clip_high) where A > 0, else max(log rho, -clip_low).
Reference: arXiv 2507.20673.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, bounded, masked


class GMPOLoss(PolicyMethod):
    """The geometric mean of token ratios, each clipped in logarithms: arXiv 2507.20673."""

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(0.4, gt=0)
    """Bound of log rho from below: the ratio of a token with a negative advantage is at least exp(-this)."""
    clip_high: float = Field(0.4, gt=0)
    """Bound of log rho from above: the ratio of a token with a positive advantage is at most exp(this)."""

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `gmpo_loss` of the batch, a mean over sequences."""
        return gmpo_loss(*batch.tensors, clip_low=self.clip_low, clip_high=self.clip_high, **batch.counts)


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "seq_mean_token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of -w s A, s = exp(the row's mean of clipped log rho): arXiv 2507.20673.

    Each token's log rho is clipped on the side that its advantage pushes it to (the `min` of PPO, in logarithms), and
    the ratio of the row is their geometric mean. With one advantage A for a row the default aggregation gives the
    paper's -s A, averaged over rows. `clip_fraction` and `approx_kl` are of the tokens, `ratio_max` of the rows.
    """
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    advantages_BL = masked(advantages, loss_mask)
    clipped_BL = torch.where(advantages_BL > 0, log_ratio_BL.clamp(max=clip_high), log_ratio_BL.clamp(min=-clip_low))
    # A token outside the mask has a log-ratio of 0, which no clip moves.
    length_B1 = (loss_mask != 0).sum(dim=-1, keepdim=True).clamp(min=1)
    # Bounded after the mean: a clamp per token would bend the ratio of the row.
    ratio_BL = bounded(clipped_BL.sum(dim=-1, keepdim=True) / length_B1).exp().expand_as(log_ratio_BL)
    return policy_output(
        ratio_BL * advantages_BL,
        log_ratio_BL,
        ratio_BL,
        clipped_BL != log_ratio_BL,
        loss_mask,
        weights,
        aggregation=aggregation,
        num_tokens=num_tokens,
        sequences=sequences,
        max_length=max_length,
    )
