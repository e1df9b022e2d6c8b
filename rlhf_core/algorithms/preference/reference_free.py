"""Losses on mean log-probs of a pair's answers, which need no reference."""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.preference.base import PairBatch, ReferenceFreeMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput, Tensor, log_sigmoid

CERTAIN = -1e-6
"""The mean log-prob above which an answer's odds are taken as constant: at 0 they are infinite."""


class SimPOLoss(ReferenceFreeMethod):
    """SimPO: mean log-probs with a target margin, without a reference.

    Formula: -log sigmoid(beta (logp_c / len_c - logp_r / len_r) - gamma).
    Reference: arXiv 2405.14734 eq. 6.
    """

    type: Literal["simpo"] = "simpo"
    beta: float = Field(2.0, gt=0)
    gamma: float = Field(1.0, ge=0)
    """Target margin, in units of the scaled reward."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B = self.beta * pairs.chosen_logprobs / pairs.chosen_lengths
        rejected_B = self.beta * pairs.rejected_logprobs / pairs.rejected_lengths
        return pair_output(-log_sigmoid(chosen_B - rejected_B - self.gamma), chosen_B, rejected_B, pairs)


class ORPOLoss(ReferenceFreeMethod):
    """ORPO: likelihood of the chosen answer and its odds against the rejected one, without a reference.

    Formula: NLL(chosen) + lambda * mean of -log sigmoid(log odds_c - log odds_r), odds = p / (1 - p).
    Reference: arXiv 2403.07691 eq. 6 and 7.

    log p is the mean log-prob of an answer. The first term is a mean over the tokens of the step's chosen answers, the
    second one over its pairs. Metrics of `pair_output` (rewards are lambda log p), and `nll`, `odds_ratio_loss` (before
    lambda), `log_odds_ratio`.
    """

    type: Literal["orpo"] = "orpo"
    odds_weight: float = Field(0.1, gt=0)
    """lambda of the paper."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        chosen_B = pairs.chosen_logprobs / pairs.chosen_lengths
        rejected_B = pairs.rejected_logprobs / pairs.rejected_lengths
        log_odds_ratio_B = _log_odds(chosen_B) - _log_odds(rejected_B)
        rewards = (self.odds_weight * chosen_B, self.odds_weight * rejected_B)
        ratio = pair_output(-log_sigmoid(log_odds_ratio_B), *rewards, pairs)  # eq. 7
        nll = -pairs.chosen_logprobs.sum() / pairs.tokens
        loss = nll + self.odds_weight * ratio.loss  # eq. 6
        metrics = ratio.metrics | {
            "loss": loss,
            "nll": nll,
            "odds_ratio_loss": ratio.loss,
            "log_odds_ratio": log_odds_ratio_B.sum() / pairs.pairs,
        }
        return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def _log_odds(mean_logprob_B: Tensor) -> Tensor:
    # expm1 keeps 1 - p exact to the last digits where p is near 1.
    certain_B = mean_logprob_B.clamp(max=CERTAIN)
    return certain_B - (-certain_B.expm1()).log()
