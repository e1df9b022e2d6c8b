"""The value (critic) loss of PPO, and how well the values explain the returns."""

# Shape legend: B rows of a batch, L positions, N masked tokens.

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.losses.output import LossOutput
from rlhf_core.token_math import masked_sum


def value_loss(
    values_BL: Tensor,
    old_values_BL: Tensor,
    returns_BL: Tensor,
    loss_mask_BL: Tensor,
    *,
    clip: float | None,
    tokens: float,
) -> LossOutput:
    """Return 0.5 sum of max((V_clip - R)^2, (V - R)^2) over `tokens`, the masked tokens of the whole optimizer step.

    V_clip = V_old + clamp(V - V_old, +-clip): arXiv 1707.06347's reference code, and lm-human-preferences. `clip` None
    is the plain squared error. Metrics: `value_loss`, `value_clip_fraction`, `value_mean`.
    """
    error_BL = (values_BL - returns_BL).square()
    was_clipped_BL = torch.zeros_like(error_BL, dtype=torch.bool)
    worse_BL = error_BL
    if clip is not None:
        clipped_BL = old_values_BL + (values_BL - old_values_BL).clamp(-clip, clip)
        clipped_error_BL = (clipped_BL - returns_BL).square()
        was_clipped_BL = clipped_error_BL > error_BL
        worse_BL = torch.maximum(error_BL, clipped_error_BL)
    loss = 0.5 * masked_sum(worse_BL, loss_mask_BL) / tokens
    metrics = {
        "value_loss": loss,
        "value_clip_fraction": masked_sum(was_clipped_BL, loss_mask_BL) / tokens,
        "value_mean": masked_sum(values_BL, loss_mask_BL) / tokens,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def explained_variance(values_BL: Tensor, returns_BL: Tensor, loss_mask_BL: Tensor) -> float:
    """Return 1 - Var(R - V) / Var(R) over the masked tokens: 1 is perfect, 0 is no better than a constant.

    0.0 when the returns do not vary: there is nothing to explain.
    """
    selected_BL = loss_mask_BL != 0
    returns_N = returns_BL[selected_BL].double()
    residual_N = returns_N - values_BL[selected_BL].double()
    if len(returns_N) == 0:
        return 0.0
    variance = returns_N.var(correction=0).item()
    return 0.0 if variance == 0 else 1 - residual_N.var(correction=0).item() / variance
