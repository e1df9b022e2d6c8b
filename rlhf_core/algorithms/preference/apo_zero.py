"""APO-zero: anchored preference optimization for chosen answers better than the policy's own.

Formula: 1 - sigmoid(beta a) + sigmoid(beta b).
Reference: arXiv 2408.06266 eq. 7.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class APOZeroLoss(ReferencedMethod):
    """Raise the chosen answer, lower the rejected one: arXiv 2408.06266; for winners better than the policy."""

    type: Literal["apo_zero"] = "apo_zero"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `apo_zero_loss` of the pairs."""
        return apo_zero_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def apo_zero_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of 1 - sigmoid(beta a) + sigmoid(beta b) over `pairs`: arXiv 2408.06266 eq. 7.

    Raises chosen answers and lowers rejected ones: for chosen answers better than the model's own.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    # arXiv 2408.06266 eq. 7: 1 - sigmoid(beta a) + sigmoid(beta b); sigmoid(-x) for 1 - sigmoid(x), which cancels where x is large.
    loss_B = torch.sigmoid(-reward_chosen_B) + torch.sigmoid(reward_rejected_B)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
