"""The value (critic) loss of PPO, and how well the values explain the returns."""

# Shape legend: B rows of a batch, L positions, N masked tokens.

from __future__ import annotations

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import masked, masked_count, masked_sum


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    *,
    clip: float | None,
    num_tokens: float | None = None,
) -> LossOutput:
    """Return 0.5 sum of max((V_clip - R)^2, (V - R)^2) over `num_tokens`, the masked tokens of the whole step.

    Tensors [B, L]. V_clip = V_old + clamp(V - V_old, +-clip): arXiv 1707.06347's reference code, and
    lm-human-preferences. `clip` None is the plain squared error; `num_tokens` None says that this call is the step.
    Metrics: `value_loss`, `value_clip_fraction`, `value_mean`.
    """
    # Masked first: a NaN outside the mask would come back through the square as a NaN gradient.
    values_BL = masked(values, loss_mask)
    error_BL = (values_BL - returns).square()
    was_clipped_BL = torch.zeros_like(error_BL, dtype=torch.bool)
    worse_BL = error_BL
    if clip is not None:
        clipped_BL = old_values + (values_BL - old_values).clamp(-clip, clip)
        clipped_error_BL = (clipped_BL - returns).square()
        was_clipped_BL = clipped_error_BL > error_BL
        worse_BL = torch.maximum(error_BL, clipped_error_BL)
    tokens = masked_count(loss_mask) if num_tokens is None else num_tokens
    loss = 0.5 * masked_sum(worse_BL, loss_mask) / tokens
    metrics = {
        "value_loss": loss,
        "value_clip_fraction": masked_sum(was_clipped_BL, loss_mask) / tokens,
        "value_mean": masked_sum(values_BL, loss_mask) / tokens,
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
