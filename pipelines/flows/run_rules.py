"""Configure the limits of a run: gates after stages, budgets, and who is notified. Nothing here enters a key."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlhf_core.errors import nearest
from rlhf_core.schema.base import Config, added_option, http_address
from rlhf_core.schema.secrets import HOLDS_SECRETS
from rlhf_core.types import FEWEST_PROMPTS
from stages.publish import OPERATORS
from stages.table import STAGES

OPPOSITE = {">=": "<", ">": "<=", "<=": ">", "<": ">="}
Event = Literal["waiting", "blocked", "over_budget", "failed", "finished"]


class GateConfig(Config):
    """A condition on a number of a finished stage, and the action if it does not hold.

    >>> GateConfig(after="reward_model", metric="accuracy_low", op=">=", value=0.65).title
    'reward_model'
    """

    after: str = Field(min_length=1)
    """Label of the stage, as `rlhf plan` shows it: `reward_model`, `online/round_1/compare`."""
    metric: str = ""
    """Metric of the stage's record, or the path of a number in its report.json: `accuracy_low`,
    `policies/ppo/gold/low`. If empty, a person approves every artifact."""
    op: Literal[">=", ">", "<=", "<"] = ">="
    value: float | None = None
    least_prompts: int = added_option(FEWEST_PROMPTS, ge=1)
    """Least number of prompts behind the number, if the stage records it. With fewer, the condition does not hold."""
    otherwise: Literal["block", "approve", "warn"] = "block"
    """Action if the condition does not hold: `block` blocks all stages after the artifact, `approve` does
    so until a person decides, `warn` only logs."""
    name: str = ""
    """Name of the gate in messages, tags and `rlhf approve`; if empty, the label in `after`."""

    @property
    def title(self) -> str:
        return self.name or self.after

    def holds(self, found: float) -> bool:
        """Whether the condition holds for a number; it never holds for NaN."""
        return self.value is not None and OPERATORS[self.op](found, self.value)

    @model_validator(mode="after")
    def _check_condition(self) -> GateConfig:
        if self.metric and self.value is None:
            raise ValueError(f"metric = {self.metric!r}: is compared with nothing; add op and value")
        if not self.metric and self.value is not None:
            raise ValueError(f"value = {self.value:g}: nothing is compared with it; add metric")
        if not self.metric and self.otherwise != "approve":
            raise ValueError(
                f"otherwise = {self.otherwise!r}: the gate has no condition; add metric, op and value, or choose 'approve'"
            )
        return self


class PricesConfig(Config):
    """Price of an hour of each kind of device, in the currency of the budget."""

    gpu: float = Field(0.0, ge=0)
    """Price of an hour of one GPU that the engines of a stage hold."""
    machine: float = Field(0.0, ge=0)
    """Price of an hour of an executed stage, regardless of its devices: the machine, with its CPUs and disks."""


class BudgetConfig(Config):
    """Limits on the cost of a run, including its earlier attempts; reused stages cost nothing."""

    hours: float | None = Field(None, gt=0)
    """Hours of executed stages."""
    gpu_hours: float | None = Field(None, gt=0)
    """Hours of executed stages times the number of GPUs that their engines hold."""
    cost: float | None = Field(None, gt=0)
    """Maximum cost of the hours of executed stages, at `prices`."""
    prices: PricesConfig = PricesConfig()
    """Prices of an hour by kind of device; judges behind an address and people are not among them."""
    comparisons: int | None = Field(None, ge=0)
    """Maximum number of pairs for people or judges, over all rounds; pairs of suites are not counted."""

    @model_validator(mode="after")
    def _check_prices(self) -> BudgetConfig:
        if self.cost is not None and self.prices == PricesConfig():
            raise ValueError(
                f"cost = {self.cost:g}: nothing has a price; add prices, such as {{gpu = 2.5, machine = 0.2}}"
            )
        return self


class ProjectConfig(Config):
    """The project that the runs of a profile belong to, in a store and on servers that several projects share."""

    name: str = Field("", pattern=r"^[\w.-]*$", max_length=100)
    """Name of the project: on records, as the tag `project:NAME` in Prefect, and before the name of the experiment in MLflow."""
    keep_days: float | None = Field(None, ge=0)
    """Days for which `rlhf store gc --profile` keeps unused results of this project; 30 if empty. Results of other projects stay."""

    @model_validator(mode="after")
    def _check_name(self) -> ProjectConfig:
        if self.keep_days is not None and not self.name:
            raise ValueError(f"keep_days = {self.keep_days:g}: is of no project; add name, or give --keep-days to gc")
        return self

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of its runs in Prefect."""
        return (f"project:{self.name}",) if self.name else ()


class DeploymentsConfig(Config):
    """Settings that the deployments on one Prefect server share."""

    limits: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = {}
    """Stage, such as `ppo` -> number of runs that may compute it at the same time; further runs wait. On the server
    these are the concurrency limits `stage:ppo`. Results that exist are reused without waiting."""
    priority: Literal["high", "default"] = "default"
    """Work queue of a deployment in a work pool (`rlhf deploy --pool`); runs in `high` start before others."""

    @model_validator(mode="after")
    def _check_stages(self) -> DeploymentsConfig:
        for name in self.limits:
            if name not in STAGES:
                raise ValueError(f"limits.{name}: is no stage; {nearest(name, list(STAGES))}")
        return self


class TrackConfig(Config):
    """Trackers that get the metrics of stages in addition to MLflow, which stays the record."""

    also: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Trackers to write to offline, in `trackers/NAME` of the state folder; they need the extra `trackers`."""


class NotifyConfig(Config):
    """A receiver that gets a small JSON object by POST when a run ends or waits."""

    webhook: Annotated[str, Field(min_length=1), HOLDS_SECRETS]
    """Address of the receiver, or `env:NAME` for an address with a secret in it."""
    format: Literal["rlhf", "slack"] = added_option("rlhf")
    """Content of the JSON: `rlhf` has `event`, `run`, `message`, `time` and `links`; `slack` has `text`, as Slack's
    incoming webhooks require."""
    events: tuple[Event, ...] = ("waiting", "blocked", "over_budget", "failed", "finished")
    timeout_s: float = Field(5.0, gt=0, le=60)
    """Deadline of the request. An unreachable receiver never fails a run."""

    @model_validator(mode="after")
    def _check_address(self) -> NotifyConfig:
        try:
            if not self.webhook.startswith("env:"):
                http_address(self.webhook)
        except ValueError:  # whose text has the address
            rule = "must be an http(s) address; give one, or env:NAME for one in a variable"
            raise ValueError(f"webhook = ...: {rule}") from None
        return self
