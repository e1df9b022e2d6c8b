"""The clipped policy gradient of PPO, and the ways to reduce token terms to one number."""

# Shape legend: B rows of a batch, L positions.

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from rlhf_core.losses.output import LossOutput
from rlhf_core.token_math import bounded, masked, masked_sum, schulman_k3

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


def ppo_clip_loss(
    logprobs_BL: Tensor,
    old_logprobs_BL: Tensor,
    advantages_BL: Tensor,
    loss_mask_BL: Tensor,
    weights_BL: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    aggregation: Aggregation,
    tokens: float,
    sequences: float,
    max_length: float,
) -> LossOutput:
    """Return the aggregate of -w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(log pi - log pi_old).

    arXiv 1707.06347 eq. 7; separate bounds ("clip higher"): DAPO, arXiv 2503.14476 eq. 10. With `dual_clip` = c the
    term of a negative advantage is bounded below by c A (arXiv 1912.09729). `weights_BL` are the detached
    importance weights of the sampler-trainer correction, 1 where there is none; a token of weight 0 stays in the
    denominators. `tokens` and `sequences` count the whole optimizer step; `max_length` is in tokens.

    Metrics: `policy_loss`, `clip_fraction` (tokens whose gradient a clip removed), `approx_kl` (k3 of old against new),
    `ratio_max`.
    """
    log_ratio_BL = masked(logprobs_BL - old_logprobs_BL, loss_mask_BL)
    ratio_BL = bounded(log_ratio_BL).exp()
    clipped_ratio_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high)
    plain_BL, clipped_BL = ratio_BL * advantages_BL, clipped_ratio_BL * advantages_BL
    objective_BL = torch.minimum(plain_BL, clipped_BL)
    was_clipped_BL = clipped_BL < plain_BL
    if dual_clip is not None:
        floor_BL = dual_clip * advantages_BL
        below_BL = (advantages_BL < 0) & (objective_BL < floor_BL)
        objective_BL = torch.where(below_BL, floor_BL, objective_BL)
        was_clipped_BL = was_clipped_BL | below_BL

    loss = aggregate(
        -weights_BL.detach() * objective_BL,
        loss_mask_BL,
        aggregation=aggregation,
        tokens=tokens,
        sequences=sequences,
        max_length=max_length,
    )
    metrics = {
        "policy_loss": loss,
        "clip_fraction": masked_sum(was_clipped_BL, loss_mask_BL) / tokens,
        "approx_kl": masked_sum(schulman_k3(-log_ratio_BL), loss_mask_BL) / tokens,
        "ratio_max": masked(ratio_BL, loss_mask_BL).max(),
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def aggregate(
    x_BL: Tensor, mask_BL: Tensor, *, aggregation: Aggregation, tokens: float, sequences: float, max_length: float
) -> Tensor:
    """Return this micro-batch's share of the mean of `x` over masked tokens of the whole optimizer step.

    `token_mean`: every token weighs the same (DAPO, arXiv 2503.14476 eq. 12). `seq_mean_token_mean`: every sequence
    weighs the same (GRPO, arXiv 2402.03300 eq. 3). `seq_mean_token_sum_norm`: sums over the constant `max_length`, so
    that length carries no bias (Dr. GRPO, arXiv 2503.20783 section 3.2). A row without masked tokens adds 0.
    """
    match aggregation:
        case "token_mean":
            return masked_sum(x_BL, mask_BL) / tokens
        case "seq_mean_token_mean":
            length_B = (mask_BL != 0).sum(dim=-1).clamp(min=1)
            return (masked(x_BL, mask_BL).sum(dim=-1) / length_B).sum() / sequences
        case "seq_mean_token_sum_norm":
            return masked_sum(x_BL, mask_BL) / (sequences * max_length)
        case _:
            assert_never(aggregation)
