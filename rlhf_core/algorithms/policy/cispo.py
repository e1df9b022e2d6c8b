"""CISPO: the ratio is a detached, clipped weight, so no token loses its gradient.

Formula: -w stopgrad(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi.
Reference: arXiv 2506.13585 eq. 4 and 5.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, bounded, masked


class CISPOLoss(PolicyMethod):
    """The ratio is a detached, clipped weight, so no token loses its gradient: arXiv 2506.13585."""

    type: Literal["cispo"] = "cispo"
    clip_high: float = Field(4.0, gt=0)
    """The weight is at most 1 + this."""
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `cispo_loss` of the batch, with a ratio that is open below."""
        return cispo_loss(*batch.tensors, clip_high=self.clip_high, aggregation=self.aggregation, **batch.counts)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_high: float,
    clip_low: float | None = None,
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of -w stopgrad(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi.

    arXiv 2506.13585 eq. 4 and 5. The clip bounds the weight of a token and never removes its gradient. `clip_low` None
    leaves the ratio open below, as the paper and ScaleRL (arXiv 2510.13786) do; their upper bound on the ratio itself
    is 1 + `clip_high`.
    """
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    ratio_BL = bounded(log_ratio_BL).exp().detach()
    # arXiv 2506.13585 eq. 5: the clipped ratio; eq. 4: it times A log pi
    weight_BL = ratio_BL.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    return policy_output(
        weight_BL * masked(advantages, loss_mask) * masked(logprobs, loss_mask),
        log_ratio_BL,
        ratio_BL,
        weight_BL != ratio_BL,
        loss_mask,
        weights,
        aggregation=aggregation,
        num_tokens=num_tokens,
        sequences=sequences,
        max_length=max_length,
    )
