"""The hinge of SLiC and RSO: a pair whose margin is large enough adds nothing.

Formula: max(0, 1 - beta h).
Reference: arXiv 2305.10425 (SLiC), arXiv 2309.06657 (RSO).
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class HingeLoss(ReferencedMethod):
    """max(0, 1 - beta h): SLiC, arXiv 2305.10425."""

    type: Literal["hinge"] = "hinge"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `hinge_loss` of the pairs."""
        return hinge_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def hinge_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of max(0, 1 - beta h) over `pairs`: the hinge of RSO, arXiv 2309.06657 (SLiC, 2305.10425)."""
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    # arXiv 2305.10425: max(0, 1 - beta h)
    loss_B = torch.relu(1 - (reward_chosen_B - reward_rejected_B))
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
