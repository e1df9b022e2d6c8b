"""Robust DPO: unbiased where labels are flipped.

Formula: [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e), e = label_smoothing.
Reference: arXiv 2403.00409.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput
from rlhf_core.errors import ConfigError, explain


class RobustDPOLoss(ReferencedMethod):
    """Unbiased DPO under flipped labels: arXiv 2403.00409."""

    type: Literal["robust"] = "robust"
    label_smoothing: float = Field(0.1, gt=0, lt=0.5)
    """Assumed share of wrong labels."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `robust_dpo_loss` of the pairs."""
        return robust_dpo_loss(*pairs.logprobs, beta=self.beta, label_smoothing=self.label_smoothing, pairs=pairs.pairs)


def robust_dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return the unbiased DPO loss under labels flipped with probability e = `label_smoothing` < 0.5.

    [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e): arXiv 2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            explain("label_smoothing", label_smoothing, "must be in [0, 0.5)", "at 0.5 the labels carry no information")
        )
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logit_B = reward_chosen_B - reward_rejected_B
    likely_B = -(1 - label_smoothing) * torch.nn.functional.logsigmoid(logit_B)
    flipped_B = label_smoothing * torch.nn.functional.logsigmoid(-logit_B)
    # arXiv 2403.00409: [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e)
    loss_B = (likely_B + flipped_B) / (1 - 2 * label_smoothing)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
