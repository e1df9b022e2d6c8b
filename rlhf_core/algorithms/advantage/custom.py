"""A user's own estimator."""

# Shape legend: P prompts, G completions of a prompt (the group).

from __future__ import annotations

from typing import Literal

from rlhf_core.algorithms.advantage.base import GroupAdvantage, GroupRewards
from rlhf_core.algorithms.token_math import Tensor
from rlhf_core.errors import ConfigError, explain
from rlhf_core.schema.base import CustomFunction


class CustomAdvantage(CustomFunction, GroupAdvantage):
    """A user's own estimator.

    Formula: what the function of the user returns for the completions of each prompt.
    Reference: docs/custom.md.
    """

    type: Literal["custom"] = "custom"

    def compare(self, groups: GroupRewards) -> Tensor:
        """Call the function with copies of rewards and lengths [P, G] and the `arguments`.

        ConfigError unless it returns finite numbers of their shape.
        """
        assert groups.function is not None
        rewards_PG = groups.rewards
        advantages_PG = groups.function(rewards_PG.clone(), groups.lengths.clone(), **self.arguments)
        is_tensor = isinstance(advantages_PG, type(rewards_PG))
        if not is_tensor or advantages_PG.shape != rewards_PG.shape:
            found = tuple(advantages_PG.shape) if is_tensor else type(advantages_PG).__name__
            rule = f"must be a tensor of shape {tuple(rewards_PG.shape)}"
            raise ConfigError(explain("advantage.function returned", found, rule, "return one number for each answer"))
        if not bool(advantages_PG.isfinite().all()):
            rule = "contains numbers that are not finite"
            raise ConfigError(explain("advantage.function returned", "a tensor", rule, "check for divisions by 0"))
        return advantages_PG.to(rewards_PG.dtype)
