"""The check of rewards that have to be numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.errors import RewardError, explain
from rlhf_core.rewards.outcomes import Outcome, screened
from rlhf_core.types import Generation


def checked(name: str, values: Sequence[float | None], generations: Sequence[Generation]) -> list[float]:
    """Return `values` if there is one finite and not absurd number per generation; RewardError otherwise."""
    outcome = screened(name, Outcome(tuple(values)), generations, on_failure="fail")
    found: list[float] = []
    for value, generation in zip(outcome.values, generations, strict=True):
        if value is None:
            key = f"rewards.{name}[prompt {generation.prompt.id}]"
            raise RewardError(
                explain(key, None, "the reward says that it does not apply", "give every prompt a reward")
            )
        found.append(value)
    return found
