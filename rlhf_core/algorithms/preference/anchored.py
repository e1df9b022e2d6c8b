"""Losses on the implicit reward of each answer of a pair, which hold the one, the other or both to a value of its own."""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.preference.base import PairBatch, ReferencedMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput, log_sigmoid


class APOZeroLoss(ReferencedMethod):
    """APO-zero: anchored preference optimization for chosen answers better than the policy's own.

    Formula: 1 - sigmoid(beta a) + sigmoid(beta b).
    Reference: arXiv 2408.06266 eq. 7.

    Raises chosen answers and lowers rejected ones.
    """

    type: Literal["apo_zero"] = "apo_zero"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        # sigmoid(-x) for 1 - sigmoid(x), which cancels where x is large
        return pair_output((-chosen_B).sigmoid() + rejected_B.sigmoid(), chosen_B, rejected_B, pairs)


class APODownLoss(ReferencedMethod):
    """APO-down: anchored preference optimization for chosen answers worse than the policy's own.

    Formula: sigmoid(beta a) + 1 - sigmoid(beta h).
    Reference: arXiv 2408.06266 eq. 8.

    Lowers both answers, the rejected one more.
    """

    type: Literal["apo_down"] = "apo_down"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        return pair_output(chosen_B.sigmoid() + (rejected_B - chosen_B).sigmoid(), chosen_B, rejected_B, pairs)


class SPPOLoss(ReferencedMethod):
    """Self-play preference optimization with hard labels.

    Formula: (a - 1/(2 beta))^2 + (b + 1/(2 beta))^2.
    Reference: arXiv 2405.00675 eq. 4.7, hard form (their eta is 1 / beta).

    The win probability of the paper is 1 for the chosen answer and 0 for the rejected one.
    """

    type: Literal["sppo"] = "sppo"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = pairs.log_ratios
        target = 1 / (2 * self.beta)
        loss_B = (chosen_B - target).square() + (rejected_B + target).square()
        return pair_output(loss_B, self.beta * chosen_B, self.beta * rejected_B, pairs)


class NCALoss(ReferencedMethod):
    """Noise contrastive alignment on pairs.

    Formula: -log sig(beta a) - log sig(-beta a) / 2 - log sig(-beta b) / 2.
    Reference: arXiv 2402.05369.

    Unlike DPO it keeps the chosen answer's likelihood from falling.
    """

    type: Literal["nca"] = "nca"

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B, rejected_B = self.rewards(pairs)
        noise_B = log_sigmoid(-chosen_B) + log_sigmoid(-rejected_B)
        return pair_output(-log_sigmoid(chosen_B) - noise_B / 2, chosen_B, rejected_B, pairs)
