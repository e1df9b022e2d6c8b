"""REINFORCE++: discounted returns, whitened over the step; no value model.

Formula: G_t = r_t + gamma G_{t+1}, whitened.
Reference: arXiv 2501.03262.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import TokenAdvantage, TokenRewards, whiten
from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.algorithms.token_math import masked


class ReinforcePPAdvantage(TokenAdvantage):
    """Discounted returns, whitened over the step: REINFORCE++, arXiv 2501.03262."""

    type: Literal["reinforce++"] = "reinforce++"
    gamma: float = Field(1.0, gt=0, le=1)

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        """Return the whitened `discounted_returns` twice: they are advantages and returns."""
        returns_BL = discounted_returns(tokens.rewards, tokens.loss_mask, gamma=self.gamma)
        whitened_BL = whiten(returns_BL, tokens.loss_mask)
        return whitened_BL, whitened_BL


def discounted_returns(rewards: Tensor, loss_mask: Tensor, *, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1} [B, L], 0 outside the mask: the advantage of REINFORCE++, arXiv 2501.03262.

    There is no critic. The paper whitens the result over the whole batch of the step, which is the caller's (`whiten`).
    """
    rewards_BL = masked(rewards, loss_mask)
    action_BL = loss_mask != 0
    returns_BL = torch.zeros_like(rewards_BL)
    next_return_B = torch.zeros_like(rewards_BL[:, 0])
    for t in reversed(range(rewards_BL.shape[1])):
        # arXiv 2501.03262: G_t = r_t + gamma G_{t+1}
        return_B = rewards_BL[:, t] + gamma * next_return_B
        next_return_B = torch.where(action_BL[:, t], return_B, next_return_B)
        returns_BL[:, t] = return_B
    return masked(returns_BL, loss_mask)
