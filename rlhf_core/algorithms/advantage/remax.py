"""ReMax: the reward of the policy's greedy answer to the prompt is the baseline; no value model, no group.

Formula: A_t = (sum of r from t on) - r(greedy answer).
Reference: arXiv 2310.10505.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import ClassVar, Literal

from rlhf_core.algorithms.advantage.base import TokenAdvantage, TokenRewards
from rlhf_core.algorithms.advantage.reinforce_pp import discounted_returns
from rlhf_core.algorithms.lazy_torch import Tensor
from rlhf_core.algorithms.token_math import masked
from rlhf_core.errors import ConfigError, explain


class ReMaxAdvantage(TokenAdvantage):
    """Returns minus the reward of one greedy answer for each prompt of a step: arXiv 2310.10505."""

    type: Literal["remax"] = "remax"

    asks_greedy: ClassVar[bool] = True

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        """Return `remax` of the tokens, and their returns."""
        if tokens.greedy is None:
            rule = "needs the reward of a greedy answer to each prompt"
            raise ConfigError(explain("advantage.type", self.type, rule, "sample and score one with temperature 0"))
        returns_BL = discounted_returns(tokens.rewards, tokens.loss_mask, gamma=1.0)
        return remax(returns_BL, tokens.greedy, tokens.loss_mask), returns_BL


def remax(returns_BL: Tensor, greedy_B: Tensor, loss_mask_BL: Tensor) -> Tensor:
    """Return G_t - r(greedy answer) [B, L], 0 outside the mask: arXiv 2310.10505.

    The baseline does not depend on the sampled answer, so the gradient stays unbiased. A KL penalty in the reward is in
    the returns of the sampled answer and not in the baseline, as in the paper's experiments.
    """
    return masked(returns_BL - greedy_B[:, None], loss_mask_BL)
