"""Estimators from the rewards of tokens."""

# Shape legend: B rows of a batch, L positions.

from typing import ClassVar, Literal

from pydantic import Field

from rlhf_core.algorithms.advantage.base import TokenAdvantage, TokenRewards
from rlhf_core.algorithms.token_math import Tensor, loaded_torch, masked, whiten
from rlhf_core.errors import ConfigError


class GAEAdvantage(TokenAdvantage):
    """Generalized advantage estimation with a value model: the estimator of PPO.

    Formula: delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lambda A_{t+1}.
    Reference: arXiv 1506.02438 eq. 16.

    The returns are A + V, with gamma = lambda = 1 the sums of the rewards to come. V_t is the value of the state before
    token t; after the last action the episode ends with value 0.
    """

    type: Literal["gae"] = "gae"
    gamma: float = Field(1.0, gt=0, le=1)
    gae_lambda: float = Field(0.95, ge=0, le=1)
    whiten: bool = True

    uses_values: ClassVar[bool] = True

    @property
    def whitens(self) -> bool:
        return self.whiten

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        advantages_BL, returns_BL = self.by_answer(tokens)
        return (whiten(advantages_BL, tokens.loss_mask) if self.whiten else advantages_BL), returns_BL

    def by_answer(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        assert tokens.values is not None
        rewards_BL, values_BL = masked(tokens.rewards, tokens.loss_mask), masked(tokens.values, tokens.loss_mask)
        advantages_BL = gae(rewards_BL, values_BL, tokens.loss_mask, gamma=self.gamma, gae_lambda=self.gae_lambda)
        return advantages_BL, advantages_BL + values_BL


class ReinforcePPAdvantage(TokenAdvantage):
    """REINFORCE++: discounted returns, whitened over the step; no value model.

    Formula: G_t = r_t + gamma G_{t+1}, whitened.
    Reference: arXiv 2501.03262.
    """

    type: Literal["reinforce++"] = "reinforce++"
    gamma: float = Field(1.0, gt=0, le=1)

    @property
    def whitens(self) -> bool:
        return True

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        """The whitened returns, twice: as advantages and as returns."""
        whitened_BL = whiten(self.by_answer(tokens)[0], tokens.loss_mask)
        return whitened_BL, whitened_BL

    def by_answer(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        returns_BL = discounted_returns(tokens.rewards, tokens.loss_mask, gamma=self.gamma)
        return returns_BL, returns_BL


class ReMaxAdvantage(TokenAdvantage):
    """ReMax: the reward of the policy's greedy answer to the prompt is the baseline; no value model, no group.

    Formula: A_t = (sum of r from t on) - r(greedy answer).
    Reference: arXiv 2310.10505.

    The baseline does not depend on the sampled answer, so the gradient stays unbiased. A KL penalty in the reward is in
    the returns of the sampled answer and not in the baseline, as in the paper's experiments.
    """

    type: Literal["remax"] = "remax"

    asks_greedy: ClassVar[bool] = True

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        if tokens.greedy is None:
            rule = "needs the reward of a greedy answer to each prompt"
            raise ConfigError("advantage.type", self.type, rule, "sample and score one with temperature 0")
        returns_BL = discounted_returns(tokens.rewards, tokens.loss_mask, gamma=1.0)
        return masked(returns_BL - tokens.greedy[:, None], tokens.loss_mask), returns_BL

    def by_answer(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        return self.estimate(tokens)


def discounted_returns(rewards: Tensor, loss_mask: Tensor, *, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} [B, L], 0 outside the mask: the advantage over values of 0."""
    rewards_BL = masked(rewards, loss_mask)
    return gae(rewards_BL, rewards_BL.new_zeros(rewards_BL.shape), loss_mask, gamma=gamma, gae_lambda=1.0)


def gae(rewards: Tensor, values: Tensor, loss_mask: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalized advantage estimates [B, L] of masked rewards and values, 0 outside the mask.

    Positions between two actions are skipped.
    """
    import numpy as np  # options are read without it

    given = rewards, values, loss_mask != 0
    # Steps in rows: a column of a long batch is scattered over memory, one place per answer. In NumPy, whose
    # calls take a third of the time at these sizes.
    rewards_LB, values_LB, action_LB = (x_BL.t().contiguous().cpu().numpy() for x_BL in given)
    advantages_LB = np.zeros_like(rewards_LB)
    next_value_B = next_advantage_B = np.zeros(len(rewards), rewards_LB.dtype)
    for t in reversed(range(len(rewards_LB))):
        delta_B = rewards_LB[t] + gamma * next_value_B - values_LB[t]
        advantage_B = delta_B + gamma * gae_lambda * next_advantage_B
        next_value_B = np.where(action_LB[t], values_LB[t], next_value_B)
        next_advantage_B = np.where(action_LB[t], advantage_B, next_advantage_B)
        advantages_LB[t] = advantage_B
    advantages_BL = loaded_torch().from_numpy(advantages_LB).t().contiguous()
    return masked(advantages_BL.to(rewards.device), loss_mask)
