"""What stands under every loss: sums and counts of masked tokens, and log-ratios that cannot overflow."""

# Shape legend: B rows of a batch, L positions.

from __future__ import annotations

from rlhf_core.algorithms.lazy_torch import Tensor, torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 4.9e8: far outside every clip range, and its square still fits fp32."""


def masked_sum(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the scalar sum of `x` in fp32 (or wider) where the mask is not 0.

    Selects rather than multiplies: a NaN or infinity at a masked position must not reach the sum.
    """
    return masked(x_BL, mask_BL).sum()


def masked(x_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """Return `x` [B, L] in fp32 (or wider), exactly 0 where the mask is 0."""
    x_BL = at_least_fp32(x_BL)
    return torch.where(mask_BL != 0, x_BL, torch.zeros_like(x_BL))


def masked_count(mask_BL: Tensor) -> Tensor:
    """Return how many tokens the mask selects, at least 1: the denominator of a call that is a whole optimizer step.

    At least 1, so that an empty mask gives a loss of 0 and not a NaN.
    """
    return (mask_BL != 0).sum().clamp(min=1)


def at_least_fp32(x: Tensor) -> Tensor:
    """Return `x` in fp32, or as it is where it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def bounded(log_ratio: Tensor) -> Tensor:
    """Return the log-ratio clamped to +-20, so that its exponential is finite in fp32 and in its gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def schulman_k3(log_ratio: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d for d = log p - log q on samples of p: >= 0, unbiased for KL(p || q), low variance.

    Schulman, "Approximating KL Divergence" (2020). Uses expm1: at d near 0 the plain form cancels to noise.
    """
    d = bounded(log_ratio)
    return torch.expm1(-d) + d
