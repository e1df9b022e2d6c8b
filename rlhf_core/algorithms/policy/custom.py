"""A user's own policy loss.

Formula: w times what the function of the user returns for each token.
Reference: docs/custom.md.
"""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, bounded, check_terms, masked
from rlhf_core.schema.base import CustomFunction


class CustomPolicyLoss(CustomFunction, PolicyMethod):
    """A function of yours: see docs/custom.md."""

    type: Literal["custom"] = "custom"
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Return `custom_policy_loss` of the user's function and the batch."""
        assert batch.function is not None
        arguments, aggregation = self.arguments, self.aggregation
        return custom_policy_loss(
            batch.function, *batch.tensors, arguments=arguments, aggregation=aggregation, **batch.counts
        )


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
    """Return the aggregate of `function`'s token values [B, L], times the importance weights.

    It is called with `logprobs, old_logprobs, advantages, loss_mask` [B, L] and `arguments`; what it returns outside the
    mask does not count. Metrics are those of the built-in losses; `clip_fraction` is 0.
    """
    terms_BL = function(logprobs, old_logprobs, advantages, loss_mask, **arguments)
    check_terms(terms_BL, logprobs.shape, "one loss for each token")
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
