"""A user's own policy loss."""

# Shape legend: B rows of a batch, L positions. Tensors are [B, L] unless noted.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.policy.base import Aggregation, PolicyBatch, PolicyMethod, policy_output
from rlhf_core.algorithms.token_math import LossOutput, check_terms, masked
from rlhf_core.schema.base import CustomFunction


class CustomPolicyLoss(CustomFunction, PolicyMethod):
    """A user's own policy loss.

    Formula: w times what the function of the user returns for each token.
    Reference: docs/custom.md.

    What it returns outside the mask does not count. `clip_fraction` is 0.
    """

    type: Literal["custom"] = "custom"
    aggregation: Aggregation = "token_mean"

    def loss(self, batch: PolicyBatch) -> LossOutput:
        """Call the function with `logprobs, old_logprobs, advantages, loss_mask` [B, L] and the `arguments`."""
        assert batch.function is not None
        terms_BL = batch.function(
            batch.logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, **self.arguments
        )
        check_terms(terms_BL, batch.logprobs, "one loss for each token")
        log_ratio_BL, ratio_BL, _ = batch.masked()
        never_BL = ratio_BL.new_zeros(ratio_BL.shape)
        objective_BL = -masked(terms_BL, batch.loss_mask)
        return policy_output(objective_BL, log_ratio_BL, ratio_BL, never_BL, batch, aggregation=self.aggregation)
