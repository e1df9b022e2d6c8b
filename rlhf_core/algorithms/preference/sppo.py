"""Self-play preference optimization with hard labels.

Formula: (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2.
Reference: arXiv 2405.00675 eq. 4.7, hard form (their eta is 1 / beta).
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class SPPOLoss(ReferencedMethod):
    """(a - 1/(2 beta))^2 + (b + 1/(2 beta))^2: arXiv 2405.00675, hard labels."""

    type: Literal["sppo"] = "sppo"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `sppo_loss` of the pairs."""
        return sppo_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def sppo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2 over `pairs`: arXiv 2405.00675 eq. 4.7, hard form.

    The paper's win probability is taken as 1 for the chosen answer and 0 for the rejected one; its eta is 1 / beta.
    """
    ratio_chosen_B = chosen_logprobs - ref_chosen_logprobs
    ratio_rejected_B = rejected_logprobs - ref_rejected_logprobs
    target = 1 / (2 * beta)
    # arXiv 2405.00675 eq. 4.7: (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2
    loss_B = (ratio_chosen_B - target).square() + (ratio_rejected_B + target).square()
    rewards = (beta * ratio_chosen_B, beta * ratio_rejected_B)
    return pair_output(loss_B, *rewards, chosen_logprobs, rejected_logprobs, pairs=pairs)
