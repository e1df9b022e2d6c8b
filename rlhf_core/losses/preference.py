"""Preference optimisation: DPO and its kin, from summed log-probabilities of the two answers of each pair."""

# Shape legend: B pairs of a batch.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlhf_core.errors import ConfigError, explain
from rlhf_core.losses.output import LossOutput


def dpo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    pairs: float,
) -> LossOutput:
    """Return sum of -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h) over `pairs`; h = log-ratio(c) - log-ratio(r).

    arXiv 2305.18290 eq. 7; with label smoothing e > 0 it is conservative DPO (Mitchell, "A note on DPO with noisy
    preferences", 2023). `pairs` counts the whole optimizer step.
    """
    reward_chosen_B = beta * (chosen_B - ref_chosen_B)
    reward_rejected_B = beta * (rejected_B - ref_rejected_B)
    logit_B = reward_chosen_B - reward_rejected_B
    loss_B = -(1 - label_smoothing) * logsigmoid(logit_B) - label_smoothing * logsigmoid(-logit_B)
    return _output(loss_B, reward_chosen_B, reward_rejected_B, chosen_B, rejected_B, pairs=pairs)


def robust_dpo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
    label_smoothing: float,
    pairs: float,
) -> LossOutput:
    """Return the unbiased DPO loss under labels flipped with probability e = `label_smoothing` < 0.5.

    [-(1-e) log sigmoid(beta h) + e log sigmoid(-beta h)] / (1 - 2e): arXiv 2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ConfigError(
            explain("label_smoothing", label_smoothing, "must be in [0, 0.5)", "0.5 means that labels carry nothing")
        )
    reward_chosen_B = beta * (chosen_B - ref_chosen_B)
    reward_rejected_B = beta * (rejected_B - ref_rejected_B)
    logit_B = reward_chosen_B - reward_rejected_B
    likely_B = -(1 - label_smoothing) * logsigmoid(logit_B)
    flipped_B = label_smoothing * logsigmoid(-logit_B)
    loss_B = (likely_B + flipped_B) / (1 - 2 * label_smoothing)
    return _output(loss_B, reward_chosen_B, reward_rejected_B, chosen_B, rejected_B, pairs=pairs)


def ipo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    chosen_length_B: Tensor,
    rejected_length_B: Tensor,
    *,
    beta: float,
    length_average: bool,
    pairs: float,
) -> LossOutput:
    """Return sum of (h - 1/(2 beta))^2 over `pairs`: arXiv 2310.12036 eq. 17 (their tau is `beta`).

    The paper's h is a difference of sums; `length_average` divides each answer's log-ratio by its token count first.
    """
    ratio_chosen_B = chosen_B - ref_chosen_B
    ratio_rejected_B = rejected_B - ref_rejected_B
    if length_average:
        ratio_chosen_B = ratio_chosen_B / chosen_length_B
        ratio_rejected_B = ratio_rejected_B / rejected_length_B
    loss_B = (ratio_chosen_B - ratio_rejected_B - 1 / (2 * beta)).square()
    return _output(loss_B, beta * ratio_chosen_B, beta * ratio_rejected_B, chosen_B, rejected_B, pairs=pairs)


def hinge_loss(
    chosen_B: Tensor, rejected_B: Tensor, ref_chosen_B: Tensor, ref_rejected_B: Tensor, *, beta: float, pairs: float
) -> LossOutput:
    """Return sum of max(0, 1 - beta h) over `pairs`: the hinge of RSO, arXiv 2309.06657 (SLiC, 2305.10425)."""
    reward_chosen_B = beta * (chosen_B - ref_chosen_B)
    reward_rejected_B = beta * (rejected_B - ref_rejected_B)
    loss_B = torch.relu(1 - (reward_chosen_B - reward_rejected_B))
    return _output(loss_B, reward_chosen_B, reward_rejected_B, chosen_B, rejected_B, pairs=pairs)


def simpo_loss(
    chosen_B: Tensor,
    rejected_B: Tensor,
    chosen_length_B: Tensor,
    rejected_length_B: Tensor,
    *,
    beta: float,
    gamma: float,
    pairs: float,
) -> LossOutput:
    """Return sum of -log sigmoid(beta (logp_c / len_c - logp_r / len_r) - gamma) over `pairs`: arXiv 2405.14734 eq. 6.

    Reference-free. Lengths count the masked tokens of each answer.
    """
    reward_chosen_B = beta * chosen_B / chosen_length_B
    reward_rejected_B = beta * rejected_B / rejected_length_B
    loss_B = -logsigmoid(reward_chosen_B - reward_rejected_B - gamma)
    return _output(loss_B, reward_chosen_B, reward_rejected_B, chosen_B, rejected_B, pairs=pairs)


def _output(
    loss_B: Tensor,
    reward_chosen_B: Tensor,
    reward_rejected_B: Tensor,
    chosen_B: Tensor,
    rejected_B: Tensor,
    *,
    pairs: float,
) -> LossOutput:
    margin_B = reward_chosen_B - reward_rejected_B
    loss = loss_B.sum() / pairs
    metrics = {
        "loss": loss,
        "rewards/chosen": reward_chosen_B.sum() / pairs,
        "rewards/rejected": reward_rejected_B.sum() / pairs,
        "rewards/margin": margin_B.sum() / pairs,
        "rewards/accuracy": (margin_B > 0).float().sum() / pairs,
        "logprobs/chosen": chosen_B.sum() / pairs,
        "logprobs/rejected": rejected_B.sum() / pairs,
    }
    return LossOutput(loss, {name: value.detach() for name, value in metrics.items()})
