"""Clip-Cov: PPO's clip, and no gradient for a few of the tokens that lower the entropy most.

Formula: -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), 0 for tokens drawn among those with cov in [cov_low, cov_high].
Reference: arXiv 2505.22617.
"""

# Shape legend: B rows of a batch, L positions, N masked tokens. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod
from rlhf_core.algorithms.policy.clip import clipped_policy_loss
from rlhf_core.algorithms.token_math import LossOutput, masked, masked_count, masked_sum


class ClipCovLoss(PolicyMethod):
    """PPO's clip, and no gradient for some tokens of high covariance, which would lower the entropy: arXiv 2505.22617."""

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    fraction: float = Field(0.0002, gt=0, le=1)
    """Share of the tokens of a step that lose their gradient, at least one."""
    cov_low: float = 1.0
    """Smallest covariance of a token that may be drawn."""
    cov_high: float = 5.0
    """Largest covariance of a token that may be drawn."""
    aggregation: Aggregation = "token_mean"

    chooses_tokens: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check_order_of_bounds(self) -> Self:
        if self.cov_low >= self.cov_high:
            raise ValueError(f"cov_low = {self.cov_low}: must be < cov_high = {self.cov_high}; lower it")
        return self

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `clipped_policy_loss` of the batch, whose drawn tokens have an advantage of 0."""
        return clipped_policy_loss(
            *batch.tensors,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            aggregation=self.aggregation,
            **batch.counts,
        )

    def step_advantages(
        self, advantages_BL: Tensor, old_logprobs_BL: Tensor, loss_mask_BL: Tensor, *, seed: int
    ) -> Tensor:
        """Return the advantages with 0 for the tokens that `drawn_by_covariance` chooses."""
        drawn_BL = drawn_by_covariance(
            advantages_BL,
            old_logprobs_BL,
            loss_mask_BL,
            fraction=self.fraction,
            low=self.cov_low,
            high=self.cov_high,
            seed=seed,
        )
        return torch.where(drawn_BL, torch.zeros_like(advantages_BL), advantages_BL)


def token_covariance(advantages_BL: Tensor, logprobs_BL: Tensor, loss_mask_BL: Tensor) -> Tensor:
    """Return (log pi - mean log pi) (A - mean A) of each token, 0 outside the mask: arXiv 2505.22617.

    The means are over the masked tokens of the call, which is to be the whole step.
    """
    count = masked_count(loss_mask_BL)
    logprob_gap_BL = logprobs_BL - masked_sum(logprobs_BL, loss_mask_BL) / count
    advantage_gap_BL = advantages_BL - masked_sum(advantages_BL, loss_mask_BL) / count
    return masked(logprob_gap_BL * advantage_gap_BL, loss_mask_BL)


def drawn_by_covariance(
    advantages_BL: Tensor,
    logprobs_BL: Tensor,
    loss_mask_BL: Tensor,
    *,
    fraction: float,
    low: float,
    high: float,
    seed: int,
) -> Tensor:
    """Return which tokens lose their gradient: max(1, fraction N) drawn uniformly of those with covariance in [low, high].

    arXiv 2505.22617. All of them where there are fewer. The paper draws again for each mini-batch, with pi of
    that moment; here it is once for a step with pi_old, the same for the first mini-batch.
    """
    covariance_BL = token_covariance(advantages_BL, logprobs_BL, loss_mask_BL)
    eligible_BL = (covariance_BL >= low) & (covariance_BL <= high) & (loss_mask_BL != 0)
    places_N = eligible_BL.flatten().nonzero().flatten()
    count = max(1, int(fraction * int((loss_mask_BL != 0).sum())))
    order_N = torch.randperm(len(places_N), generator=torch.Generator().manual_seed(seed))
    drawn_BL = torch.zeros_like(eligible_BL)
    drawn_BL.view(-1)[places_N[order_N[:count]]] = True
    return drawn_BL
