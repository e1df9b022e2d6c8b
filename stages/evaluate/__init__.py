"""Declare and configure the evaluation: `[evaluate.evaluate]`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from rlhf_core.schema.base import OPERATIONAL, RenamedConfig, Seconds
from rlhf_core.stage.key import StageSpec
from rlhf_core.types import CHAMPION, GenerationsRef, PolicyRef, ReportRef, RewardModelRef
from stages.declaration import From, stage
from stages.measured import MEAN, Numbers, Specs, named_inputs

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
        """The fields under the names, and in the order, in which results were recorded."""
        shown = table.pop("samples_shown")
        return super().recorded(table) | {"resamples": RESAMPLES, "samples_shown": shown}

    def of(self, policies: Collection[str]) -> EvaluateConfig:
        """This configuration without the parents and best-of rows of policies that are not among `policies`.

        A profile that removes a section of another one inherits the entries of its policy. Without its opponent (the
        champion, while there is none), a policy is compared with the reference.
        """
        there = [(ours, theirs) for ours, theirs in self.parents.items() if ours in policies]
        parents = {ours: theirs for ours, theirs in there if theirs in policies}
        best_of = {name: n for name, n in self.best_of.items() if name in policies}
        return self.model_copy(update={"parents": parents, "best_of": best_of})


HEADLINES = ("gold", "reward_model", "kl", "win_rate", "tokens")
"""Means of a policy that are metrics of `evaluate`, the most informative first."""
NO_BRACKETS = str.maketrans("", "", "()")
"""MLflow refuses brackets in the name of a metric; `best-of-8 (sft)` has some."""
POLICY_FIGURES = ("prompts", "samples", "kl_per_token", "entropy", "repetition", "distinct_2", "failed")
POLICY_MEANS = ("kl", "tokens", "truncated")


def policy_numbers(*, gold: bool, reward_model: bool, champion: bool) -> list[str]:
    """Numbers of a policy in the report of `evaluate`, with the judge of the answers."""
    judges = [name for name, there in (("gold", gold), ("reward_model", reward_model)) if there]
    over = [f"{name}_over_champion" for name in judges if champion]
    compared = ["win_rate", "improvement"] if judges else []
    figures = ["gold_length_correlation"] * gold + ["gold_reward_model_correlation"] * (gold and reward_model)
    return [
        *(*POLICY_FIGURES, *figures),
        *(f"{measure}/{figure}" for measure in (*judges, *compared, *over, *POLICY_MEANS) for figure in MEAN),
    ]


def _numbers(spec: StageSpec, specs: Specs) -> Numbers:
    config: Any = spec.config
    names = list(named_inputs(spec, "generations"))
    names += [f"best-of-{n} ({name})" for name, n in config.best_of.items() if name in names]
    numbers = policy_numbers(
        gold=bool(config.gold), reward_model="reward_model" in spec.inputs, champion=CHAMPION in names
    )
    recorded = [measure for measure in HEADLINES if f"{measure}/mean" in numbers]
    written = dict.fromkeys([*names, *(name.translate(NO_BRACKETS) for name in names)])
    return Numbers(
        [f"{name}/{measure}" for name in written for measure in (*recorded, "prompts", "failed", "source/*")],
        [*(f"policies/{name}/{number}" for name in names for number in (*numbers, "sources/*")), "settings/*"],
    )


@stage(
    version=2,
    code="strict",
    engines=("trainer",),
    section="evaluate.evaluate",
    page="evaluation.md",
    metrics=_numbers,
)
def evaluate(
    config: EvaluateConfig,
    *,
    generations: Annotated[
        Mapping[str, GenerationsRef], From({"sft": "evaluate/sft/generate", "ppo": "evaluate/ppo/generate"})
    ],
    reference: Annotated[PolicyRef, From("sft")],
    reward_model: Annotated[RewardModelRef | None, From("reward_model")] = None,
) -> ReportRef:
    """One report over the `generations` of several policies; an empty `reward_model` leaves its column out."""
