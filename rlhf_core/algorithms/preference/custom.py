"""A user's own loss on pairs."""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.preference.base import PairBatch, PreferenceMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput, check_terms
from rlhf_core.schema.base import CustomFunction


class CustomPreferenceLoss(CustomFunction, PreferenceMethod):
    """A user's own loss on pairs.

    Formula: what the function of the user returns for each pair.
    Reference: docs/custom.md.

    The rewards in the metrics are the log-ratios to the reference.
    """

    type: Literal["custom"] = "custom"
    reference: bool = True
    """Whether it compares with a reference. False spares the reference's pass; the function is given zeros for it."""

    @property
    def uses_reference(self) -> bool:
        """Whether the user's function compares with a reference."""
        return self.reference

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Call the function with the four log-probs [B], the lengths by keyword (tokens, [B]) and the `arguments`."""
        assert pairs.function is not None
        loss_B = pairs.function(
            pairs.chosen_logprobs,
            pairs.rejected_logprobs,
            pairs.ref_chosen_logprobs,
            pairs.ref_rejected_logprobs,
            chosen_lengths=pairs.chosen_lengths,
            rejected_lengths=pairs.rejected_lengths,
            **self.arguments,
        )
        check_terms(loss_B, pairs.chosen_logprobs, "one loss for each pair")
        return pair_output(loss_B, *pairs.log_ratios, pairs)
