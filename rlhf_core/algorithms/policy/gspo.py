"""Group sequence policy optimization: one ratio per sequence, the geometric mean of its tokens'.

Formula: -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean of log rho over the row).
Reference: arXiv 2507.18071 eq. 5 and 7.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.policy.clip import clipped_objective
from rlhf_core.algorithms.token_math import LossOutput, bounded, masked


class GSPOLoss(PolicyMethod):
    """One ratio per sequence, the geometric mean of its tokens': arXiv 2507.18071."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0)
    clip_high: float = Field(4e-4, gt=0)

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `gspo_loss` of the batch, a mean over sequences."""
        return gspo_loss(*batch.tensors, clip_low=self.clip_low, clip_high=self.clip_high, **batch.counts)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "seq_mean_token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of -w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(the row's mean log rho).

    arXiv 2507.18071 eq. 5 and 7, its bounds (section 5.1) and, by default, its mean over sequences. The ratio of a row
    is one number, so a row is clipped as a whole. `approx_kl` is of the tokens, `ratio_max` of the rows.
    """
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    length_B1 = (loss_mask != 0).sum(dim=-1, keepdim=True).clamp(min=1)
    # arXiv 2507.18071 eq. 7: s = exp(mean of log rho). Bounded after the mean: a clamp per token would bend the ratio of the row.
    ratio_BL = bounded(log_ratio_BL.sum(dim=-1, keepdim=True) / length_B1).exp().expand_as(log_ratio_BL)
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
