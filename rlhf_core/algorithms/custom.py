"""Losses that a user wrote: what they are given, what they must return, and how it becomes the loss of an optimizer step.

They return one term for each pair or token, which is summed here: so no loss can depend on how a step is cut into
micro-batches, or on the number of ranks.
"""

# Shape legend: B rows or pairs of a batch, L positions.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.pair_output import pair_output
from rlhf_core.algorithms.policy import Aggregation, policy_output
from rlhf_core.algorithms.token_math import bounded, masked
from rlhf_core.errors import ConfigError, explain


def custom_pair_loss(
    function: Callable[..., Tensor],
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    arguments: Mapping[str, Any],
    pairs: float | None = None,
) -> LossOutput:
    """Return the sum, over `pairs`, of what `function` returns for each pair [B].

    It is called with the four summed log-probs [B], the keywords `chosen_lengths` and `rejected_lengths` (tokens, [B]) and
    `arguments`. Metrics are those of `pair_output`; the rewards in them are the log-ratios to the reference.
    """
    four = (chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    loss_B = function(*four, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, **arguments)
    _check(loss_B, chosen_logprobs.shape, "one loss for each pair")
    rewards = (chosen_logprobs - ref_chosen_logprobs, rejected_logprobs - ref_rejected_logprobs)
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)


def custom_policy_loss(
    function: Callable[..., Tensor],
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    arguments: Mapping[str, Any],
    num_tokens: float | None = None,
    weights: Tensor | None = None,
    aggregation: Aggregation = "token_mean",
    sequences: float | None = None,
    max_length: float | None = None,
) -> LossOutput:
    """Return the aggregate of what `function` returns for each token [B, L], times the importance weights.

    It is called with `logprobs, old_logprobs, advantages, loss_mask` [B, L] and `arguments`; what it returns outside the
    mask does not count. Metrics are those of the built-in losses; `clip_fraction` is 0.
    """
    terms_BL = function(logprobs, old_logprobs, advantages, loss_mask, **arguments)
    _check(terms_BL, logprobs.shape, "one loss for each token")
    log_ratio_BL = masked(logprobs - old_logprobs, loss_mask)
    return policy_output(
        -masked(terms_BL, loss_mask),
        log_ratio_BL,
        bounded(log_ratio_BL).exp(),
        torch.zeros_like(log_ratio_BL),
        loss_mask,
        weights,
        aggregation=aggregation,
        num_tokens=num_tokens,
        sequences=sequences,
        max_length=max_length,
    )


def _check(returned: object, shape: torch.Size, what: str) -> None:
    """Raise ConfigError unless `returned` are terms of this shape through which a gradient flows."""
    if not isinstance(returned, Tensor) or returned.shape != shape:
        found = f"shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else type(returned).__name__
        rule = f"must be a tensor of shape {tuple(shape)}"
        raise ConfigError(explain("loss.function returned", found, rule, f"return {what}, without a mean or a sum"))
    if torch.is_grad_enabled() and not returned.requires_grad:
        rule = "has no gradient"
        raise ConfigError(explain("loss.function returned", "a tensor", rule, "compute it from the policy's log-probs"))
