"""Advantage estimators. Token estimators take shaped rewards [B, L], group estimators one reward per completion [P, G].

| method | estimator |
|---|---|
| PPO | `gae`, then `whiten` |
| REINFORCE++ | `discounted_returns`, then `whiten` |
| REINFORCE++-baseline | `group_centered`, then `whiten` |
| GRPO, Dr. GRPO | `group_normalized`, `group_centered` |
| RLOO, OPO | `leave_one_out`, `opo` |

Token rewards, values and advantages count only at action positions (mask 1); an environment's tokens between two
action spans are stepped over, so discounting counts actions.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlhf_core.algorithms.token_math import masked, masked_count, masked_sum
from rlhf_core.errors import ConfigError, DataError, explain

WHITEN_EPS = 1e-8


def gae(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) [B, L], both 0 outside the mask; whitening is the caller's (`whiten`).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}; returns = A + V: arXiv 1506.02438 eq. 16.
    `values[:, t]` is the value of the state before token t; after the last action the episode ends with value 0. With
    gamma = lambda = 1 the returns are the sums of the rewards to come.
    """
    rewards_BL, values_BL = masked(rewards, loss_mask), masked(values, loss_mask)
    action_BL = loss_mask != 0
    advantages_BL = torch.zeros_like(rewards_BL)
    next_value_B = torch.zeros_like(rewards_BL[:, 0])
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in reversed(range(rewards_BL.shape[1])):
        delta_B = rewards_BL[:, t] + gamma * next_value_B - values_BL[:, t]
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        next_value_B = torch.where(action_BL[:, t], values_BL[:, t], next_value_B)
        next_advantage_B = torch.where(action_BL[:, t], advantage_B, next_advantage_B)
        advantages_BL[:, t] = advantage_B
    advantages_BL = masked(advantages_BL, loss_mask)
    return advantages_BL, advantages_BL + values_BL


def discounted_returns(rewards: Tensor, loss_mask: Tensor, *, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1} [B, L], 0 outside the mask: the advantage of REINFORCE++, arXiv 2501.03262.

    There is no critic. The paper whitens the result over the whole batch of the step, which is the caller's (`whiten`).
    """
    rewards_BL = masked(rewards, loss_mask)
    action_BL = loss_mask != 0
    returns_BL = torch.zeros_like(rewards_BL)
    next_return_B = torch.zeros_like(rewards_BL[:, 0])
    for t in reversed(range(rewards_BL.shape[1])):
        return_B = rewards_BL[:, t] + gamma * next_return_B
        next_return_B = torch.where(action_BL[:, t], return_B, next_return_B)
        returns_BL[:, t] = return_B
    return masked(returns_BL, loss_mask)


def leave_one_out(rewards_PG: Tensor) -> Tensor:
    """Return r_i - mean of the other rewards of its group: RLOO, arXiv 2402.14740.

    That is G / (G - 1) times the distance to the mean of the whole group.
    """
    group = _group_size(rewards_PG, "leave_one_out")
    return group_centered(rewards_PG) * (group / (group - 1))


def group_normalized(rewards_PG: Tensor, *, eps: float) -> Tensor:
    """Return (r - group mean) / (group std + eps): GRPO, arXiv 2402.03300, section 4.1.2.

    The standard deviation is the sample's (divisor G - 1), as in the published implementations.
    """
    _group_size(rewards_PG, "group_normalized")
    advantages_PG = group_centered(rewards_PG)
    return advantages_PG / (advantages_PG.std(dim=1, keepdim=True) + eps)


def group_centered(rewards_PG: Tensor) -> Tensor:
    """Return r - group mean: Dr. GRPO (arXiv 2503.20783, section 3.2) and, whitened after, REINFORCE++-baseline.

    The other half of Dr. GRPO is the constant divisor of the loss: aggregation `constant`. Measured from the group's
    first reward, so that equal rewards give exactly 0: rounding noise divided by a standard deviation that is noise too
    would look like an advantage.
    """
    _group_size(rewards_PG, "group_centered")
    offset_PG = rewards_PG - rewards_PG[:, :1]
    return offset_PG - offset_PG.mean(dim=1, keepdim=True)


def opo(rewards_PG: Tensor, lengths_PG: Tensor) -> Tensor:
    """Return r - b, b = sum(l r) / sum(l) over the group: the optimal baseline of OPO, arXiv 2505.23585.

    `lengths_PG` counts the completions' tokens: the squared norm of a completion's gradient is taken to grow with them.
    Equal rewards give exactly 0, as in `group_centered`. Raises DataError for a group without tokens.
    """
    _group_size(rewards_PG, "opo")
    tokens_P1 = lengths_PG.sum(dim=1, keepdim=True)
    if bool((tokens_P1 <= 0).any()):
        rule = "the baseline is a mean weighted by length"
        raise DataError(explain("lengths", 0, rule, "drop prompts whose completions are all empty"))
    offset_PG = rewards_PG - rewards_PG[:, :1]
    return offset_PG - (lengths_PG * offset_PG).sum(dim=1, keepdim=True) / tokens_P1


def custom_advantages(
    function: Callable[..., Tensor], rewards_PG: Tensor, lengths_PG: Tensor, *, arguments: Mapping[str, Any]
) -> Tensor:
    """Return what a user's `function(rewards, lengths, **arguments)` makes of the groups.

    It gets copies, and must return finite numbers of their shape [P, G]; ConfigError if it does not.
    """
    advantages_PG = function(rewards_PG.clone(), lengths_PG.clone(), **arguments)
    if not isinstance(advantages_PG, Tensor) or advantages_PG.shape != rewards_PG.shape:
        found = tuple(advantages_PG.shape) if isinstance(advantages_PG, Tensor) else type(advantages_PG).__name__
        rule = f"must be a tensor of shape {tuple(rewards_PG.shape)}"
        raise ConfigError(explain("advantage.function returned", found, rule, "return one number for each answer"))
    if not bool(torch.isfinite(advantages_PG).all()):
        rule = "has numbers that are not finite"
        raise ConfigError(explain("advantage.function returned", "a tensor", rule, "look for divisions by 0"))
    return advantages_PG.to(rewards_PG.dtype)


def whiten(values: Tensor, loss_mask: Tensor, *, shift_mean: bool = True) -> Tensor:
    """Return `values` with variance 1 over the masked tokens, 0 outside; the mean goes too, unless not `shift_mean`.

    Population variance, as in lm-human-preferences (arXiv 1909.08593). Pass the whole batch of the step at once. An
    empty mask gives zeros.
    """
    count = masked_count(loss_mask)
    mean = masked_sum(values, loss_mask) / count
    centred_BL = masked(values - mean, loss_mask)
    scaled_BL = centred_BL * torch.rsqrt(centred_BL.square().sum() / count + WHITEN_EPS)
    return scaled_BL if shift_mean else masked(scaled_BL + mean, loss_mask)


def zero_variance_groups(rewards_PG: Tensor) -> int:
    """Return how many groups have equal rewards throughout: they carry no gradient."""
    return int((rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).sum())


def _group_size(rewards_PG: Tensor, estimator: str) -> int:
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ConfigError(
            explain(
                "group_size",
                rewards_PG.shape[1] if rewards_PG.dim() == 2 else tuple(rewards_PG.shape),
                f"{estimator} compares completions of one prompt and needs >= 2 of them",
                "raise the samples per prompt, or choose gae or reinforce++",
            )
        )
    return int(rewards_PG.shape[1])
