"""Noise contrastive alignment on pairs.

Formula: -log sig(beta a) - log sig(-beta a) / 2 - log sig(-beta b) / 2.
Reference: arXiv 2402.05369.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput


class NCALoss(ReferencedMethod):
    """Noise contrastive alignment on pairs: arXiv 2402.05369."""

    type: Literal["nca"] = "nca"

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `nca_loss` of the pairs."""
        return nca_loss(*pairs.logprobs, beta=self.beta, pairs=pairs.pairs)


def nca_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor,
    ref_rejected_logprobs: Tensor,
    *,
    beta: float,
    pairs: float | None = None,
) -> LossOutput:
    """Return sum of -log sig(beta a) - log sig(-beta a) / 2 - log sig(-beta b) / 2 over `pairs`: arXiv 2402.05369.

    Noise contrastive alignment for pairs: unlike DPO it keeps the chosen answer's likelihood from falling.
    """
    reward_chosen_B = beta * (chosen_logprobs - ref_chosen_logprobs)
    reward_rejected_B = beta * (rejected_logprobs - ref_rejected_logprobs)
    logsigmoid = torch.nn.functional.logsigmoid
    noise_B = logsigmoid(-reward_chosen_B) + logsigmoid(-reward_rejected_B)
    # arXiv 2402.05369: -log sig(beta a) - log sig(-beta a) / 2 - log sig(-beta b) / 2
    loss_B = -logsigmoid(reward_chosen_B) - noise_B / 2
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)
