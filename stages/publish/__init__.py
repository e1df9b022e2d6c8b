"""Declare and configure `[publish]` and its gate."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.schema.base import Config, RenamedConfig, added_option
from rlhf_core.types import FEWEST_PROMPTS, PolicyRef, PublishedRef, ReportRef
from stages import measured
from stages.declaration import From, stage

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


class Threshold(Config):
    """One condition, such as `{metric = "gold/mean", op = ">=", than = "sft"}` or `{metric = "kl/mean", op = "<=", value = 20}`."""

    metric: str
    """Path into the policy's row of report.json, separated by / or .: `gold/low`, `win_rate/mean`, `tokens/mean`."""
    op: Literal[">=", ">", "<=", "<"]
    value: float | None = None
    than: str = ""
    """Policy of the report whose same metric is the bound instead of `value`."""
    factor: float = 1.0
    """Factor on the other policy's metric: `{metric = "tokens/mean", op = "<=", than = "sft", factor = 1.5}`."""

    @model_validator(mode="after")
    def _check_one_bound(self) -> Threshold:
        if (self.value is None) == (not self.than):
            raise ValueError(f"metric = {self.metric!r}: needs either value or than; give exactly one of them")
        return self


class ChallengeConfig(Config):
    """The comparison with the current champion, on the same held-out prompts."""

    metric: Literal["gold", "reward_model"] = "gold"
    """Score that compares the answers: the gold reward of `[evaluate]`, or the score of its reward model."""
    margin: float = Field(0.0, ge=0)
    """The interval of the mean difference, prompt by prompt, must be above this for the alias `champion` to move."""


class GateNote(Config):
    """A gate of the run, its finding, and the decision of a person."""

    name: str
    found: str
    outcome: str
    answer: str = ""
    """The decision, with its author, time and reason."""


class PublishConfig(RenamedConfig):
    """The registration of the policy, and the gate that it must pass."""

    name: str = Field("rlhf-policy", min_length=1)
    """Name of the model in the registry."""
    policy: str = ""
    """Name of the policy in the report; "" finds it by its digest."""
    gate: tuple[Threshold, ...] = ()
    """Conditions that must all hold. An empty gate passes."""
    least_prompts: int = added_option(FEWEST_PROMPTS, ge=1)
    """Least number of prompts behind each number of the gate and the challenge. With fewer, the gate does not pass."""
    challenge: ChallengeConfig | None = added_option(None)
    """If given, the policy becomes champion only if it is better than the current one. A first policy has no opponent."""
    decisions: tuple[GateNote, ...] = added_option(())
    """Results of the `[[gates]]` of the run, for the model card. The pipeline fills it in."""
    hub: bool = added_option(False)
    """Whether the artifact also has a folder `hub` with the weights, the tokenizer and the card, ready for the Hugging Face Hub."""
    intended_use: str = "Research on preference learning. Not reviewed for use with people."
    license: str = "To be chosen by whoever releases the model; mind the licences of the base model and of the data."


@stage(
    version=1,
    code="strict",
    engines=("registry",),
    section="publish",
    metrics=measured.fixed("gate/passed", "gate/checks"),
)
def publish(
    config: PublishConfig,
    *,
    policy: Annotated[PolicyRef, From("ppo")],
    report: Annotated[ReportRef, From("evaluate")],
    champion: Annotated[PolicyRef | None, From("")] = None,
) -> PublishedRef:
    """Gate, model card and registration of `policy`, which has to beat `champion` (if empty, the current one) under `config.challenge`."""
