"""SimPO: mean log-probs with a target margin, without a reference.

Formula: -log sigmoid(beta (logp_c / len_c - logp_r / len_r) - gamma).
Reference: arXiv 2405.14734 eq. 6.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferenceFreeMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class SimPOLoss(ReferenceFreeMethod):
    """Reference-free, on mean log-probs with a target margin: arXiv 2405.14734."""

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0)
    """Target margin, in units of the scaled reward."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `simpo_loss` of the pairs."""
        return simpo_loss(*pairs.policy_logprobs, **pairs.lengths, beta=self.beta, gamma=self.gamma, pairs=pairs.pairs)


def simpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    gamma: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -log sigmoid(beta (logp_c / len_c - logp_r / len_r) - gamma) over `pairs`.

    arXiv 2405.14734 eq. 6. `pairs`: number of pairs in the optimizer step (default: the pairs of this call).
    """
    reward_chosen_B = beta * chosen_logprobs / chosen_lengths
    reward_rejected_B = beta * rejected_logprobs / rejected_lengths
    # arXiv 2405.14734 eq. 6: -log sigmoid(beta (logp_c / len_c - logp_r / len_r) - gamma)
    loss_B = -torch.nn.functional.logsigmoid(reward_chosen_B - reward_rejected_B - gamma)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
