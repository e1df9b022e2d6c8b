"""Configure what is watched while a policy is optimized: `[ppo.evaluate]` and `[[ppo.monitors]]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.measured import evaluation_metrics, is_named, remedy_of, step_metrics
from rlhf_core.config.rewards import RewardsConfig, what_moves_rewards
from rlhf_core.monitoring.agreement import KLEstimate, Mismatch
from rlhf_core.monitoring.bands import (
    Band,
    Collapse,
    Drift,
    EndToken,
    ExplainedVariance,
    Invalid,
    Skipped,
    ZeroVariance,
)
from rlhf_core.monitoring.over_optimization import INDEPENDENT, PROXY, OverOptimization
from rlhf_core.schema.base import Config

Monitor = Annotated[
    Band
    | Drift
    | Collapse
    | OverOptimization
    | Mismatch
    | KLEstimate
    | ZeroVariance
    | Invalid
    | Skipped
    | ExplainedVariance
    | EndToken,
    Field(discriminator="type"),
]


class HeldOutConfig(Config):
    """Evaluation of the policy on held-out prompts every few steps, with the best checkpoint kept."""

    every: int = Field(10, ge=1)
    """Number of steps between two evaluations; the first is before the first step, the last after the last one."""
    prompts: int = Field(64, ge=3)
    """Number of prompts that are held out of the training prompts by their content; the same in every run on the data."""
    samples: int = Field(1, ge=1)
    """Number of answers per held-out prompt, with the same seeds at every evaluation."""
    independent: RewardsConfig | None = None
    """Rewards that only judge held-out answers and never train: a gold reward, a judge, an ensemble of reward models."""
    metric: str = ""
    """Metric, the higher the better, by which the best checkpoint is chosen: `eval/independent/mean` or, without
    independent rewards, `eval/reward/mean` if empty."""
    export: Literal["last", "best"] = "best"
    """Which checkpoint becomes the result of the stage."""
    patience: int = Field(0, ge=0)
    """Number of evaluations in a row without a better one after which the stage ends; 0 never ends it early."""

    @property
    def best_by(self) -> str:
        """Return the metric by which the best checkpoint is chosen."""
        return self.metric or (INDEPENDENT if self.independent else PROXY)


def check_watched(
    evaluate: HeldOutConfig | None,
    monitors: tuple[Monitor, ...],
    rewards: RewardsConfig,
    *,
    custom_loss: bool,
    uses_reference: bool,
    uses_values: bool,
    late: str,
) -> None:
    """Raise ValueError for monitors that could never find anything or act; `late` is a setting that samples ahead."""
    labels = [monitor.label for monitor in monitors]
    evaluations = evaluation_metrics(rewards, evaluate.independent) if evaluate else ()
    known = (*step_metrics(rewards, custom_loss=custom_loss), *evaluations)
    for number, monitor in enumerate(monitors):
        where = f"monitors[{number}]"
        if labels.index(monitor.label) != number:
            raise ValueError(
                f"{where}.name = {monitor.label!r}: another monitor has this name; give one of them another"
            )
        if monitor.action == "rollback" and late:
            raise ValueError(
                f'{where}.action = "rollback": {late} has answers of the rejected policy on their way; set it to 0, or '
                'choose "stop"'
            )
        if monitor.action != "warn" and evaluate is None:
            raise ValueError(
                f"{where}.action = {monitor.action!r}: the checkpoint to return to is chosen by evaluations, and there are "
                'none; add [ppo.evaluate], or choose "warn"'
            )
        for name in monitor.reads():
            missing = _never_logged(name, evaluate, uses_reference=uses_reference, uses_values=uses_values)
            if missing:
                raise ValueError(f"{where}.metric = {name!r}: is never logged, {missing}")
            if not is_named(name, known):
                raise ValueError(f"{where}.metric = {name!r}: no step has such a metric; {remedy_of(name, known)}")
    moved = what_moves_rewards(evaluate.independent) if evaluate and evaluate.independent else ""
    if moved:
        setting = moved.removeprefix("rewards.")
        raise ValueError(
            f"evaluate.independent.{setting}: evaluations with normalized rewards cannot be compared; remove it"
        )
    if evaluate and evaluate.metric == INDEPENDENT and not evaluate.independent:
        raise ValueError(f"evaluate.metric = {INDEPENDENT!r}: there is no independent reward; set evaluate.independent")
    if evaluate and evaluate.metric and not is_named(evaluate.metric, evaluations):
        near = remedy_of(evaluate.metric, evaluations)
        raise ValueError(f"evaluate.metric = {evaluate.metric!r}: evaluations have no such metric; {near}")


def _never_logged(name: str, evaluate: HeldOutConfig | None, *, uses_reference: bool, uses_values: bool) -> str:
    """Return why a metric is never logged and what to do about it, "" if it may be."""
    if name.startswith("kl/") and not uses_reference:
        return "because there is no reference; set kl_coef above 0"
    if name.startswith("value/") and not uses_values:
        return 'because there is no value model; use advantage = "gae"'
    if name.startswith("eval/") and evaluate is None:
        return "because nothing is evaluated; add [ppo.evaluate]"
    if name.startswith("eval/independent") and evaluate is not None and evaluate.independent is None:
        return "because there is no independent reward; add [ppo.evaluate.independent]"
    return ""
