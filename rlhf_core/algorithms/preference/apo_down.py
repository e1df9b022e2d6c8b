"""APO-down: anchored preference optimization for chosen answers worse than the policy's own.

Formula: sigmoid(beta a) + 1 - sigmoid(beta h).
Reference: arXiv 2408.06266 eq. 8.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class APODownLoss(ReferencedMethod):
    """Lower both, the rejected one more: arXiv 2408.06266; for winners worse than the policy."""

    type: Literal["apo_down"] = "apo_down"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `apo_down_loss` of the pairs."""
        return apo_down_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def apo_down_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of sigmoid(beta a) + 1 - sigmoid(beta h) over `pairs`: arXiv 2408.06266 eq. 8.

    Lowers both answers, the rejected one more: for a model better than the chosen answers.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    # arXiv 2408.06266 eq. 8: sigmoid(beta a) + 1 - sigmoid(beta h)
    loss_B = torch.sigmoid(reward_chosen_B) + torch.sigmoid(reward_rejected_B - reward_chosen_B)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
