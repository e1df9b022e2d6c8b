"""Configure the evaluation: `[evaluate.evaluate]`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlhf_core.schema.base import OPERATIONAL, RenamedConfig, Seconds

RESAMPLES = 2000


class EvaluateConfig(RenamedConfig):
    """The measures of the evaluation and the comparisons between policies."""

    gold: str = ""
    """Gold reward as `module:function` or `file.py:function`: list[Generation] -> list[float]; "" for none."""
    gold_timeout_s: Annotated[Seconds, OPERATIONAL] = 600.0
    """Deadline, in seconds, of the gold reward for the answers of one policy."""
    reference: str = "sft"
    """Name in the pipeline of the policy to which KL is measured and, unless `parents` sets another, win rates are
    computed against. If the reference input is another evaluated policy, its name is used instead."""
    parents: dict[str, str] = {}
    """Opponent of each policy in its win rate, by the policy's name. A profile that removes a policy may keep its entry
    here and in `best_of`."""
    best_of: dict[str, int] = {}
    """Number n by policy: adds a row with the answer that the reward model ranks best among each prompt's first n."""
    level: float = Field(0.95, gt=0, lt=1)
    """Confidence level of the intervals."""
    samples_shown: int = Field(16, ge=0)
    """Number of prompts whose answers are shown side by side."""

    @model_validator(mode="before")
    @classmethod
    def _drop_resamples(cls, table: Any) -> Any:
        # Intervals were once drawn by resampling. The option is gone, and results are recorded with its only value.
        given = isinstance(table, Mapping) and table.get("resamples") == RESAMPLES
        return {name: one for name, one in table.items() if name != "resamples"} if given else table

    def recorded(self, table: dict[str, Any]) -> dict[str, Any]:
        """Return the fields under the names, and in the order, that results were recorded with."""
        shown = table.pop("samples_shown")
        return super().recorded(table) | {"resamples": RESAMPLES, "samples_shown": shown}

    def of(self, policies: Collection[str]) -> EvaluateConfig:
        """Return this configuration without the parents and best-of rows of policies that are not among `policies`.

        A profile that removes a section of another one inherits the entries of its policy. Without its opponent (the
        champion, while there is none), a policy is compared with the reference.
        """
        there = [(ours, theirs) for ours, theirs in self.parents.items() if ours in policies]
        parents = {ours: theirs for ours, theirs in there if theirs in policies}
        best_of = {name: n for name, n in self.best_of.items() if name in policies}
        return self.model_copy(update={"parents": parents, "best_of": best_of})
