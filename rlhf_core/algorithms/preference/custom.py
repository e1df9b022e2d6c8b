"""A user's own loss on pairs.

Formula: what the function of the user returns for each pair.
Reference: docs/custom.md.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.preference.base import PairBatch, PreferenceMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput, check_terms
from rlhf_core.schema.base import CustomFunction


class CustomPreferenceLoss(CustomFunction, PreferenceMethod):
    """A function of yours: see docs/custom.md."""

    type: Literal["custom"] = "custom"
    reference: bool = True
    """Whether it compares with a reference. False spares the reference's pass; the function is given zeros for it."""

    @property
    def uses_reference(self) -> bool:
        """Whether the user's function compares with a reference."""
        return self.reference

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `custom_pair_loss` of the user's function and the pairs."""
        assert pairs.function is not None
        arguments, count = self.arguments, pairs.pairs
        return custom_pair_loss(pairs.function, *pairs.logprobs, **pairs.lengths, arguments=arguments, pairs=count)


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
    """Return sum(`function`'s pair values [B]) / `pairs`.

    It is called with the four summed log-probs [B], the keywords `chosen_lengths` and `rejected_lengths` (tokens, [B]) and
    `arguments`. Metrics are those of `pair_output`; the rewards in them are the log-ratios to the reference.
    """
    four = (chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs)
    loss_B = function(*four, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths, **arguments)
    check_terms(loss_B, chosen_logprobs.shape, "one loss for each pair")
    rewards = (chosen_logprobs - ref_chosen_logprobs, rejected_logprobs - ref_rejected_logprobs)
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)
