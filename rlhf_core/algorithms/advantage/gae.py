"""Generalized advantage estimation with a value model: the estimator of PPO.

Formula: delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}.
Reference: arXiv 1506.02438 eq. 16.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import TokenAdvantage, TokenRewards, whiten
from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.token_math import masked


class GAEAdvantage(TokenAdvantage):
    """Generalised advantage estimation with a value model: arXiv 1506.02438."""

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(0.95, ge=0, le=1)
    whiten: bool = True

    uses_values: ClassVar[bool] = True

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        """Return `gae` of the tokens, the advantages whitened over the step if `whiten`."""
        assert tokens.values is not None
        mask_BL = tokens.loss_mask
        advantages_BL, returns_BL = gae(
            tokens.rewards, tokens.values, mask_BL, gamma=self.gamma, gae_lambda=self.gae_lambda
        )
        return (whiten(advantages_BL, mask_BL) if self.whiten else advantages_BL), returns_BL


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
        # arXiv 1506.02438 eq. 16: delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}
        delta_B = rewards_BL[:, t] + gamma * next_value_B - values_BL[:, t]
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        next_value_B = torch.where(action_BL[:, t], values_BL[:, t], next_value_B)
        next_advantage_B = torch.where(action_BL[:, t], advantage_B, next_advantage_B)
        advantages_BL[:, t] = advantage_B
    advantages_BL = masked(advantages_BL, loss_mask)
    return advantages_BL, advantages_BL + values_BL
