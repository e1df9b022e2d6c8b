"""PPO's clipped surrogate; with separate bounds "clip higher", and dual clip.

Formula: -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A).
Reference: arXiv 1707.06347 eq. 7; clip higher: arXiv 2503.14476 eq. 10; dual clip: arXiv 1912.09729.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, bounded, masked


class ClipLoss(PolicyMethod):
    """PPO's clipped surrogate: arXiv 1707.06347; with 0.2 and 0.28 the "clip higher" of DAPO."""

    type: Literal["clip"] = "clip"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    dual_clip: float = Field(0.0, ge=0)
    """Bounds the loss of negative advantages (arXiv 1912.09729); 0 switches it off, 3 is common."""
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `clipped_policy_loss` of the batch."""
        return clipped_policy_loss(
            *batch.tensors,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=self.dual_clip or None,
            aggregation=self.aggregation,
            **batch.counts,
        )


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(log pi - log pi_old).

    arXiv 1707.06347 eq. 7; separate bounds ("clip higher"): DAPO, arXiv 2503.14476 eq. 10. With `dual_clip` = c the
    term of a negative advantage is bounded below by c A (arXiv 1912.09729).
    """
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    ratio_BL = bounded(log_ratio_BL).exp()
    objective_BL, was_clipped_BL = clipped_objective(
        ratio_BL, masked(advantages, loss_mask), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return policy_output(
        objective_BL,
        log_ratio_BL,
        ratio_BL,
        was_clipped_BL,
        loss_mask,
        weights,
        aggregation=aggregation,
        num_tokens=num_tokens,
        sequences=sequences,
        max_length=max_length,
    )


def clipped_objective(
    ratio_BL: Tensor, advantages_BL: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the pessimistic objective of each token, and whether a clip removed its gradient."""
    clipped_ratio_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high)
    plain_BL, clipped_BL = ratio_BL * advantages_BL, clipped_ratio_BL * advantages_BL
    # arXiv 1707.06347 eq. 7: min(rho A, clip(rho) A)
    objective_BL = torch.minimum(plain_BL, clipped_BL)
    was_clipped_BL = clipped_BL < plain_BL
    if dual_clip is not None:
        # arXiv 1912.09729: max(min(rho A, clip(rho) A), c A) where A < 0
        floor_BL = dual_clip * advantages_BL
        below_BL = (advantages_BL < 0) & (objective_BL < floor_BL)
        objective_BL = torch.where(below_BL, floor_BL, objective_BL)
        was_clipped_BL = was_clipped_BL | below_BL
    return objective_BL, was_clipped_BL
