"""Base classes and helpers of advantage estimators.

Token estimators take shaped rewards [B, L]; group estimators compare the completions of a prompt, one reward each [P, G].
Token rewards, values and advantages count only at action positions (mask 1); an environment's tokens between two action
spans are stepped over, so discounting counts actions.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rlhf_core.algorithms.token_math import Tensor
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import Config


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """Rewards, loss mask and values of all completions of a step [B, L]; without a value model, there are no values.

    `greedy` is the reward of the greedy answer to each completion's prompt [B], for an estimator that needs it.
    """

    rewards: Tensor
    loss_mask: Tensor
    values: Tensor | None
    greedy: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """Rewards and token counts of the completions of each prompt of a step [P, G]; `function` is the user's, for `custom`."""

    rewards: Tensor
    lengths: Tensor
    function: Callable[..., Tensor] | None = None


class AdvantageMethod(Config):
    """An advantage estimator: its options are its fields. A subclass in this folder is registered under its `type`."""

    if TYPE_CHECKING:
        type: str

    uses_values: ClassVar[bool] = False
    """Whether a value model is trained for it."""
    asks_greedy: ClassVar[bool] = False
    """Whether it compares with the reward of a greedy answer to each prompt, which is then sampled and scored."""
    divides_by_spread: ClassVar[bool] = False
    """Whether it divides by a statistic of the rewards, so that the rewards it compares must not contain a penalty."""


class TokenAdvantage(AdvantageMethod):
    """An estimator from the rewards of tokens."""

    def estimate(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        """Compute advantages and returns [B, L], 0 outside the mask."""
        raise NotImplementedError

    def by_answer(self, tokens: TokenRewards) -> tuple[Tensor, Tensor]:
        """The part of `estimate` before it whitens over the step, if no answer's advantages depend on another answer.

        Steps too large for one tensor are computed with it in blocks of answers; others are computed whole.
        """
        raise NotImplementedError

    @property
    def whitens(self) -> bool:
        """Whether `estimate` whitens the advantages over the step."""
        return False


class GroupAdvantage(AdvantageMethod):
    """An estimator that compares the completions of a prompt, at least two."""

    whitened: ClassVar[bool] = False
    """Whether the advantages of tokens are whitened over the step."""

    @property
    def least_group(self) -> int:
        """The smallest number of samples per prompt that it can compare."""
        return 2

    def compare(self, groups: GroupRewards) -> Tensor:
        """Compute one advantage for each completion [P, G]."""
        raise NotImplementedError


def group_centered(rewards_PG: Tensor) -> Tensor:
    """r - group mean, measured from the group's first reward, so that equal rewards give exactly 0.

    Otherwise rounding noise divided by a standard deviation that is noise too would look like an advantage.
    """
    group_size(rewards_PG, "group_centered")
    offset_PG = rewards_PG - rewards_PG[:, :1]
    return offset_PG - offset_PG.mean(dim=1, keepdim=True)


def zero_variance_groups(rewards_PG: Tensor) -> int:
    """Count the groups in which all rewards are equal: they carry no gradient."""
    return int((rewards_PG.amax(dim=1) == rewards_PG.amin(dim=1)).sum())


def group_size(rewards_PG: Tensor, estimator: str) -> int:
    """Check that each prompt has at least two completions to compare, and return G. Raises ConfigError otherwise."""
    if rewards_PG.dim() != 2 or rewards_PG.shape[1] < 2:
        raise ConfigError(
            "group_size",
            rewards_PG.shape[1] if rewards_PG.dim() == 2 else tuple(rewards_PG.shape),
            f"{estimator} compares completions of one prompt and needs >= 2 of them",
            "raise samples_per_prompt, or use gae or reinforce++",
        )
    return int(rewards_PG.shape[1])
