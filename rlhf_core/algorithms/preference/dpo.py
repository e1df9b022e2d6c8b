"""Direct preference optimization: a logistic loss on the margin of the log-ratios.

Formula: -log sigmoid(beta h).
Reference: arXiv 2305.18290 eq. 7.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class DPOLoss(ReferencedMethod):
    """-log sigmoid(beta h): arXiv 2305.18290."""

    type: Literal["dpo"] = "dpo"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `dpo_loss` of the pairs."""
        return dpo_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h) over `pairs`; h = log-ratio(c) - log-ratio(r).

    arXiv 2305.18290 eq. 7; with label smoothing e > 0 it is conservative DPO (Mitchell, "A note on DPO with noisy
    preferences", 2023).
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    # arXiv 2305.18290 eq. 7, with smoothed labels: -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h)
    loss_B = smoothed_logistic(reward_chosen_B - reward_rejected_B, label_smoothing=label_smoothing)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


def smoothed_logistic(logit_B: Tensor, *, label_smoothing: float) -> Tensor:
    """Return -(1-e) log sigmoid(x) - e log sigmoid(-x), elementwise."""
    logsigmoid = torch.nn.functional.logsigmoid
    return -(1 - label_smoothing) * logsigmoid(logit_B) - label_smoothing * logsigmoid(-logit_B)
