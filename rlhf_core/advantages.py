"""Advantage estimators. Token estimators take shaped rewards [B, L], group estimators one reward per completion [P, G].

Token rewards, values and advantages count only at action positions (mask 1); an environment's tokens between two
action spans are stepped over, so discounting counts actions.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.errors import ConfigError, explain
from rlhf_core.token_math import masked, masked_sum

WHITEN_EPS = 1e-8


def gae(
    rewards_BL: Tensor, values_BL: Tensor, mask_BL: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages_BL, returns_BL), both 0 outside the mask; whitening is the caller's (`whiten`).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; returns = A + V: arXiv 1506.02438 eq. 16.
    `values_BL[t]` is the value of the state before token t; after the last action the episode ends with value 0. With
    gamma = lambda = 1 the returns are the sums of the rewards to come.
    """
    rewards_BL, values_BL = masked(rewards_BL, mask_BL), masked(values_BL, mask_BL)
    action_BL = mask_BL != 0
    advantages_BL = torch.zeros_like(rewards_BL)
    next_value_B = torch.zeros_like(rewards_BL[:, 0])
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(rewards_BL.shape[1])):
        delta_B = rewards_BL[:, t] + gamma * next_value_B - values_BL[:, t]
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        next_value_B = torch.where(action_BL[:, t], values_BL[:, t], next_value_B)
        next_advantage_B = torch.where(action_BL[:, t], advantage_B, next_advantage_B)
        advantages_BL[:, t] = advantage_B
    advantages_BL = masked(advantages_BL, mask_BL)
    return advantages_BL, advantages_BL + values_BL


def reinforce_pp(rewards_BL: Tensor, mask_BL: Tensor, *, gamma: float) -> Tensor:
    """Return discounted returns of the token rewards, whitened over all masked tokens: arXiv 2501.03262.

    There is no critic. Pass the whole batch of the step at once: the whitening is global.
    """
    rewards_BL = masked(rewards_BL, mask_BL)
    action_BL = mask_BL != 0
    returns_BL = torch.zeros_like(rewards_BL)
    next_return_B = torch.zeros_like(rewards_BL[:, 0])
    for t in reversed(range(rewards_BL.shape[1])):
        return_B = rewards_BL[:, t] + gamma * next_return_B
        next_return_B = torch.where(action_BL[:, t], return_B, next_return_B)
        returns_BL[:, t] = return_B
    return whiten(returns_BL, mask_BL, shift_mean=True)


def rloo(rewards_PG: Tensor) -> Tensor:
    """Return r_i - mean of the other rewards of its group: arXiv 2402.14740.

    That is G / (G - 1) times the distance to the mean of the whole group.
    """
    _require_groups(rewards_PG, "rloo")
    group = rewards_PG.shape[1]
    return group_mean_baseline(rewards_PG) * (group / (group - 1))


def grpo(rewards_PG: Tensor, *, eps: float) -> Tensor:
    """Return (r - group mean) / (group std + eps): arXiv 2402.03300, section 4.1.2.

    The standard deviation is the sample's (divisor G - 1), as in the published implementations.
    """
    _require_groups(rewards_PG, "grpo")
    advantages_PG = group_mean_baseline(rewards_PG)
    return advantages_PG / (advantages_PG.std(dim=1, keepdim=True) + eps)


def dr_grpo(rewards_PG: Tensor) -> Tensor:
    """Return r - group mean: arXiv 2503.20783, section 3.2.

    The paper's other half is the constant divisor of the loss: aggregation `seq_mean_token_sum_norm`.
    """
    return group_mean_baseline(rewards_PG)


def group_mean_baseline(rewards_PG: Tensor) -> Tensor:
    """Return r - group mean; REINFORCE++-baseline (arXiv 2501.03262) whitens the result over the batch.

    Measured from the group's first reward, so that equal rewards give exactly 0: rounding noise divided by a standard
    deviation that is noise too would look like an advantage.
    """
    _require_groups(rewards_PG, "group_mean_baseline")
    offset_PG = rewards_PG - rewards_PG[:, :1]
    return offset_PG - offset_PG.mean(dim=1, keepdim=True)


def whiten(x_BL: Tensor, mask_BL: Tensor, *, shift_mean: bool) -> Tensor:
    """Return `x` with variance 1 over the masked tokens, 0 outside; the mean is removed if `shift_mean`, else kept.

    Population variance, as in lm-human-preferences (arXiv 1909.08593). An empty mask gives zeros.
    """
    count = (mask_BL != 0).sum().clamp(min=1)
    mean = masked_sum(x_BL, mask_BL) / count
    centred_BL = masked(x_BL - mean, mask_BL)
    scaled_BL = centred_BL * torch.rsqrt(centred_BL.square().sum() / count + WHITEN_EPS)
    return scaled_BL if shift_mean else masked(scaled_BL + mean, mask_BL)


def zero_variance_groups(rewards_PG: Tensor) -> int:
    """Return how many groups have equal rewards throughout: they carry no gradient."""
    return int((rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).sum())


def _require_groups(rewards_PG: Tensor, estimator: str) -> None:
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ConfigError(
            explain(
                "group_size",
                rewards_PG.shape[1] if rewards_PG.dim() == 2 else tuple(rewards_PG.shape),
                f"{estimator} compares completions of one prompt and needs >= 2 of them",
                "raise the samples per prompt, or choose gae or reinforce_pp",
            )
        )
