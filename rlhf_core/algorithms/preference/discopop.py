"""DiscoPOP: the log-ratio modulated loss that was found by search.

Formula: -(1-m) log sigmoid(beta h) + m exp(-beta h), m = sigmoid(beta h / tau).
Reference: arXiv 2406.08414 eq. 5.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput, bounded


class DiscoPOPLoss(ReferencedMethod):
    """The log-ratio modulated loss that was found by search: arXiv 2406.08414.

    Not convex: from h = 0 its gradient lowers the chosen answer, and it rewards pairs only beyond a hump. A policy that
    starts at its reference may stay on the wrong side.
    """

    type: Literal["discopop"] = "discopop"
    beta: float = Field(0.05, gt=0)
    tau: float = Field(0.05, gt=0)
    """Temperature of the modulation."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `discopop_loss` of the pairs."""
        return discopop_loss(*pairs.logprobs, beta=self.beta, tau=self.tau, pairs=pairs.pairs)


def discopop_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    tau: float = 0.05,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -(1-m) log sigmoid(beta h) + m exp(-beta h), m = sigmoid(beta h / tau): arXiv 2406.08414 eq. 5.

    The log-ratio modulated loss that the paper's search found. The exponent is bounded at +-20; m is 0 long before.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logit_B = reward_chosen_B - reward_rejected_B
    # arXiv 2406.08414 eq. 5: -(1-m) log sigmoid(beta h) + m exp(-beta h), m = sigmoid(beta h / tau)
    exponential_B = torch.sigmoid(logit_B / tau) * bounded(-logit_B).exp()
    loss_B = exponential_B - torch.sigmoid(-logit_B / tau) * torch.nn.functional.logsigmoid(logit_B)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
