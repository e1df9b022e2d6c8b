"""RankBoost's loss: exponential in the margin of the log-ratios.

Formula: exp(-beta h).
Reference: Freund et al., "An efficient boosting algorithm for combining preferences", 2003.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import bounded


class RankBoostLoss(ReferencedMethod):
    """exp(-beta h): a pair that is ordered wrongly weighs exponentially more."""

    type: Literal["rankboost"] = "rankboost"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `rankboost_loss` of the pairs."""
        return rankboost_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def rankboost_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float,
) -> LossOutput:
    """Return sum of exp(-beta h) over `pairs`; the exponent is bounded at +-20."""
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    loss_B = bounded(reward_rejected_B - reward_chosen_B).exp()
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
