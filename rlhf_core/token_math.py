"""Two primitives under every loss: sums over masked tokens, and log-ratios that cannot overflow."""

# Shape legend: B rows of a batch, L positions.

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 4.9e8: far outside every clip range, and its square still fits fp32."""


def masked_sum(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the scalar sum of `x` in fp32 (or wider) where the mask is not 0.

    Selects rather than multiplies: a NaN or infinity at a masked position must not reach the sum.
    """
    return masked(x_BL, mask_BL).sum()


def masked(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return `x` [B, L] in fp32 (or wider), exactly 0 where the mask is 0."""
    x_BL = x_BL if x_BL.dtype == torch.float64 else x_BL.float()
    return torch.where(mask_BL != 0, x_BL, torch.zeros_like(x_BL))


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio clamped to +-20, so that its exponential is finite in fp32 and in its gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def schulman_k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d for d = log p - log q on samples of p: >= 0, unbiased for KL(p || q), low variance.

    Schulman, "Approximating KL Divergence" (2020). Uses expm1: at d near 0 the plain form cancels to noise.
    """
    d = bounded(log_ratio)
    return torch.expm1(-d) + d
