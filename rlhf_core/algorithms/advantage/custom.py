"""A user's own estimator.

Formula: what the function of the user returns for the completions of each prompt.
Reference: docs/custom.md.
"""

# Shape legend: B rows of a batch, L positions, P prompts, G completions of a prompt (the group).

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards
from rlhf_core.algorithms.lazy_torch import Tensor, torch
from rlhf_core.errors import ConfigError, explain
from rlhf_core.schema.base import CustomFunction


class CustomAdvantage(CustomFunction, GroupAdvantage):
    """A function of yours from the rewards of the answers to each prompt to their advantages: see docs/custom.md."""

    type: Literal["custom"] = "custom"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Return `custom_advantages` of the user's function."""
        assert groups.function is not None
        return custom_advantages(groups.function, groups.rewards, groups.lengths, arguments=self.arguments)


def custom_advantages(
    function: Callable[..., Tensor], rewards_PG: Tensor, lengths_PG: Tensor, *, arguments: Mapping[str, Any]
) -> Tensor:
    """Return the result of a user's `function(rewards, lengths, **arguments)` for the groups.

    It gets copies, and must return finite numbers of their shape [P, G]; ConfigError if it does not.
    """
    advantages_PG = function(rewards_PG.clone(), lengths_PG.clone(), **arguments)
    if not isinstance(advantages_PG, torch.Tensor) or advantages_PG.shape != rewards_PG.shape:
        found = tuple(advantages_PG.shape) if isinstance(advantages_PG, torch.Tensor) else type(advantages_PG).__name__
        rule = f"must be a tensor of shape {tuple(rewards_PG.shape)}"
        raise ConfigError(explain("advantage.function returned", found, rule, "return one number for each answer"))
    if not bool(torch.isfinite(advantages_PG).all()):
        rule = "contains numbers that are not finite"
        raise ConfigError(explain("advantage.function returned", "a tensor", rule, "check for divisions by 0"))
    return advantages_PG.to(rewards_PG.dtype)
