"""ORPO: likelihood of the chosen answer and its odds against the rejected one, without a reference.

Formula: NLL(chosen) + lambda * mean of -log sigmoid(log odds_c - log odds_r), odds = p / (1 - p).
Reference: arXiv 2403.07691 eq. 6 and 7.
"""

# Shape legend: B pairs of a batch. Tensors are [B]; log-probs are sums over the answer.

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.preference.base import PairBatch, ReferenceFreeMethod, pair_output
from rlhf_core.algorithms.token_math import LossOutput

CERTAIN = -1e-6
"""The mean log-prob above which an answer's odds are taken as constant: at 0 they are infinite."""


class ORPOLoss(ReferenceFreeMethod):
    """Reference-free: likelihood of the chosen answer and its odds against the rejected one: arXiv 2403.07691."""

    type: Literal["orpo"] = "orpo"
    odds_weight: float = Field(0.1, gt=0)
    """lambda of the paper."""

    def loss(self, pairs: PairBatch) -> LossOutput:
        """Return `orpo_loss` of the pairs."""
        return orpo_loss(
            *pairs.policy_logprobs, **pairs.lengths, lambda_=self.odds_weight, pairs=pairs.pairs, tokens=pairs.tokens
        )


def orpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    lambda_: float,
    pairs: float | None = None,
    tokens: float | None = None,
) -> LossOutput:
    """Return NLL(chosen) + `lambda_` * mean of -log sigmoid(log odds_c - log odds_r): arXiv 2403.07691 eq. 6 and 7.

    odds = p / (1 - p) with log p the mean log-prob of an answer. The first term is a mean over the chosen answers'
    `tokens`, the second one over `pairs`, each of the whole optimizer step (default: those of this call).
    Metrics of `pair_output` (rewards are lambda log p), and `nll`, `odds_ratio_loss` (before `lambda_`),
    `log_odds_ratio`.
    """
    mean_chosen_B, mean_rejected_B = chosen_logprobs / chosen_lengths, rejected_logprobs / rejected_lengths
    log_odds_ratio_B = _log_odds(mean_chosen_B) - _log_odds(mean_rejected_B)
    ratio = pair_output(
        -torch.nn.functional.logsigmoid(log_odds_ratio_B),
        lambda_ * mean_chosen_B,
        lambda_ * mean_rejected_B,
        chosen_logprobs,
        rejected_logprobs,
        pairs=pairs,
    )
    nll = -chosen_logprobs.sum() / (chosen_lengths.sum() if tokens is None else tokens)
    # arXiv 2403.07691 eq. 6, with eq. 7 in `ratio`: NLL(chosen) - lambda log sigmoid(log odds_c - log odds_r)
    loss = nll + lambda_ * ratio.loss
    metrics = ratio.metrics | {
        "loss": loss,
        "nll": nll,
        "odds_ratio_loss": ratio.loss,
        "log_odds_ratio": log_odds_ratio_B.sum() / (len(log_odds_ratio_B) if pairs is None else pairs),
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})


def _log_odds(mean_logprob_B: Tensor) -> Tensor:
    # expm1 keeps 1 - p exact to the last digits where p is near 1.
    certain_B = mean_logprob_B.clamp(max=CERTAIN)
    return certain_B - torch.log(-torch.expm1(certain_B))
