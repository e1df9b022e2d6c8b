"""Preference losses without a reference model, from summed log-probabilities and lengths of both answers of a pair."""

# Shape legend: B pairs of a batch. Tensors are [B]; lengths count the masked tokens of each answer.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.algorithms.output import LossOutput
from rlhf_core.algorithms.pair_output import pair_output

CERTAIN = -1e-6
"""The mean log-prob above which an answer's odds are taken as constant: at 0 they are infinite."""


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

    arXiv 2405.14734 eq. 6. `pairs` counts the whole optimizer step; None says that this call is the step.
    """
    reward_chosen_B = beta * chosen_logprobs / chosen_lengths
    reward_rejected_B = beta * rejected_logprobs / rejected_lengths
    loss_B = -logsigmoid(reward_chosen_B - reward_rejected_B - gamma)
    return pair_output(loss_B, reward_chosen_B, reward_rejected_B, chosen_logprobs, rejected_logprobs, pairs=pairs)


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
    `tokens`, the second one over `pairs`, each of the whole optimizer step; None says that this call is the step.
    Metrics of `pair_output` (rewards are lambda log p), and `nll`, `odds_ratio_loss` (before `lambda_`),
    `log_odds_ratio`.
    """
    mean_chosen_B, mean_rejected_B = chosen_logprobs / chosen_lengths, rejected_logprobs / rejected_lengths
    log_odds_ratio_B = _log_odds(mean_chosen_B) - _log_odds(mean_rejected_B)
    ratio = pair_output(
        -logsigmoid(log_odds_ratio_B),
        lambda_ * mean_chosen_B,
        lambda_ * mean_rejected_B,
        chosen_logprobs,
        rejected_logprobs,
        pairs=pairs,
    )
    nll = -chosen_logprobs.sum() / (chosen_lengths.sum() if tokens is None else tokens)
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
