"""SAPO: a smooth gate on the ratio instead of a clip; tokens far from the sampler fade out.

Formula: -w (4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_positive where A > 0, else tau_negative.
Reference: arXiv 2511.20347.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, bounded, masked


class SAPOLoss(PolicyMethod):
    """A smooth, temperature-controlled gate on the ratio instead of a clip: arXiv 2511.20347."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    tau_negative: float = Field(1.05, gt=0)
    """Temperature for the others; a larger one fades faster, which the paper advises for negative advantages."""
    aggregation: Aggregation = "seq_mean_token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `sapo_loss` of the batch."""
        return sapo_loss(
            *batch.tensors,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
            aggregation=self.aggregation,
            **batch.counts,
        )


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "seq_mean_token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of -w f(rho) A, f(x) = (4 / tau) sigmoid(tau (x - 1)): arXiv 2511.20347.

    At rho = 1 the gradient is that of rho A, and falls off as sech^2(tau (rho - 1) / 2) on both sides of it. Nothing is
    clipped, so `clip_fraction` is 0. The paper averages over sequences.
    """
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    ratio_BL = bounded(log_ratio_BL).exp()
    advantages_BL = masked(advantages, loss_mask)
    positive_BL, negative_BL = (torch.full_like(ratio_BL, tau) for tau in (tau_positive, tau_negative))
    tau_BL = torch.where(advantages_BL > 0, positive_BL, negative_BL)
    # arXiv 2511.20347: f(rho) = 4 / tau * sigmoid(tau (rho - 1))
    gate_BL = 4 / tau_BL * torch.sigmoid(tau_BL * (ratio_BL - 1))
    return policy_output(
        gate_BL * advantages_BL,
        log_ratio_BL,
        ratio_BL,
        torch.zeros_like(ratio_BL),
        loss_mask,
        weights,
        aggregation=aggregation,
        num_tokens=num_tokens,
        sequences=sequences,
        max_length=max_length,
    )
