"""Policy gradients with importance ratios - PPO, GSPO, CISPO - and the ways to reduce token terms to one number.

The three losses share their keywords and their metrics. `num_tokens` and `sequences` count the whole optimizer step
(None: this call is the whole step, and both are counted here), `max_length` is the divisor, in tokens, of the
aggregation `constant`. `weights` [B, L] are the importance weights of the sampler-trainer correction, detached here
(None: 1 everywhere); a token of weight 0 stays in the denominators.

Metrics: `policy_loss`, `clip_fraction` (tokens whose ratio a clip replaced), `approx_kl` (k3 of old against new),
`ratio_max`.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless said.

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

import torch
from torch import Tensor

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.token_math import bounded, masked, masked_count, masked_sum, schulman_k3
from rlhf_core.errors import ConfigError, explain

Aggregation: TypeAlias = Literal["token_mean", "seq_mean_token_mean", "constant"]


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
    objective_BL, was_clipped_BL = _clipped_objective(
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
    # Bounded after the mean: a clamp per token would bend the ratio of the row.
    ratio_BL = bounded(log_ratio_BL.sum(dim=-1, keepdim=True) / length_B1).exp().expand_as(log_ratio_BL)
    objective_BL, was_clipped_BL = _clipped_objective(
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


def aggregate(
    x_BL: Tensor,
    mask_BL: Tensor,
    *,
    aggregation: Aggregation,
    tokens: float | Tensor,
    sequences: float,
    max_length: float | None,
) -> Tensor:
    """Return this micro-batch's share of the mean of `x` over masked tokens of the whole optimizer step.

    `token_mean`: every token weighs the same (DAPO, arXiv 2503.14476 eq. 12). `seq_mean_token_mean`: every sequence
    weighs the same (GRPO, arXiv 2402.03300 eq. 3). `constant`: sums over the constant `max_length`, so that length
    carries no bias (Dr. GRPO, arXiv 2503.20783 section 3.2). A row without masked tokens adds 0.
    """
    match aggregation:
        case "token_mean":
            return masked_sum(x_BL, mask_BL) / tokens
        case "seq_mean_token_mean":
            length_B = (mask_BL != 0).sum(dim=-1).clamp(min=1)
            return (masked(x_BL, mask_BL).sum(dim=-1) / length_B).sum() / sequences
        case "constant":
            if max_length is None:
                rule = "aggregation 'constant' divides by it"
                raise ConfigError(explain("max_length", None, rule, "give the longest completion, in tokens"))
            return masked_sum(x_BL, mask_BL) / (sequences * max_length)
        case _:
            assert_never(aggregation)


def _clipped_objective(
    ratio_BL: Tensor, advantages_BL: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return the pessimistic objective of each token, and whether a clip removed its gradient."""
    clipped_ratio_BL = ratio_BL.clamp(1 - clip_low, 1 + clip_high)
    plain_BL, clipped_BL = ratio_BL * advantages_BL, clipped_ratio_BL * advantages_BL
    objective_BL = torch.minimum(plain_BL, clipped_BL)
    was_clipped_BL = clipped_BL < plain_BL
    if dual_clip is not None:
        floor_BL = dual_clip * advantages_BL
        below_BL = (advantages_BL < 0) & (objective_BL < floor_BL)
        objective_BL = torch.where(below_BL, floor_BL, objective_BL)
        was_clipped_BL = was_clipped_BL | below_BL
    return objective_BL, was_clipped_BL


def policy_output(
    objective_BL: Tensor,
    log_ratio_BL: Tensor,
    ratio_BL: Tensor,
    was_clipped_BL: Tensor,
    loss_mask_BL: Tensor,
    weights_BL: Tensor | None,
    *,
    aggregation: Aggregation,
    num_tokens: float | None,
    sequences: float | None,
    max_length: float | None,
) -> LossOutput:
    """Return the aggregate of -w objective, with the metrics that the losses here share."""
    terms_BL = -objective_BL if weights_BL is None else -masked(weights_BL.detach(), loss_mask_BL) * objective_BL
    tokens = masked_count(loss_mask_BL) if num_tokens is None else num_tokens
    loss = aggregate(
        terms_BL,
        loss_mask_BL,
        aggregation=aggregation,
        tokens=tokens,
        sequences=float(len(loss_mask_BL)) if sequences is None else sequences,
        max_length=max_length,
    )
    metrics = {
        "policy_loss": loss,
        "clip_fraction": masked_sum(was_clipped_BL, loss_mask_BL) / tokens,
        "approx_kl": masked_sum(schulman_k3(-log_ratio_BL), loss_mask_BL) / tokens,
        "ratio_max": masked(ratio_BL, loss_mask_BL).max(),
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})
