"""Length-normalized DPO: the mean log-ratio of an answer's tokens instead of the sum.

Formula: -log sigmoid(beta (a / len_c - b / len_r)).
Reference: arXiv 2411.15124 (Tulu 3).
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.preference.dpo import smoothed_logistic
from rlhf_core.algorithms.token_math import LossOutput


class DPONormLoss(ReferencedMethod):
    """DPO on mean log-ratios of tokens, so that a longer answer has no larger margin: arXiv 2411.15124."""

    type: Literal["dpo_norm"] = "dpo_norm"
    beta: float = Field(5.0, gt=0)
    """Strength of the pull to the reference; of the size of a length times that of `dpo`."""

    @property
    def sums_logprobs(self) -> bool:
        """Return False: the loss is on mean log-ratios."""
        return False

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `dpo_norm_loss` of the pairs."""
        return dpo_norm_loss(*pairs.logprobs, **pairs.lengths, beta=self.beta, pairs=pairs.pairs)


def dpo_norm_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -log sigmoid(beta (a / len_c - b / len_r)) over `pairs`: arXiv 2411.15124.

    a and b are the summed log-ratios of the chosen and of the rejected answer, len_c and len_r their trained tokens,
    at least 1: an answer without any has a log-ratio of 0.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs) / chosen_lengths.clamp(min=1)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs) / rejected_lengths.clamp(min=1)
    # arXiv 2411.15124: -log sigmoid(beta (a / len_c - b / len_r))
    loss_B = smoothed_logistic(reward_chosen_B - reward_rejected_B, label_smoothing=0.0)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
