"""Configure evaluation and monitoring of policy optimization: `[ppo.evaluate]` and `[[ppo.monitors]]`.

List the metrics of policy optimization and of training on rows, so that a misspelt metric is refused before they run.

`*` in a name stands for any text, since users' functions log under any name. The lists contain every name that a run
may log; whether it does may depend on the data.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.rewards import Rewards, RewardsConfig, what_moves_rewards
from rlhf_core.errors import nearest
from rlhf_core.monitoring.agreement import KLEstimate, LogprobMismatch
from rlhf_core.monitoring.bands import INDEPENDENT, PROXY, Band, Collapse, Drift, OverOptimization
from rlhf_core.schema.base import Config

# ---------------------------------------------------------------- measured

UPDATE = ("loss", "grad_norm", "learning_rate", "skipped", "router_aux")
"""Metrics of every optimizer step."""
POLICY_LOSS = ("policy_loss", "clip_fraction", "approx_kl", "ratio_max", "entropy", "correction_fraction", "ref_kl",
               "kl_loss", "dropped_by_loss", *UPDATE)  # fmt: skip
VALUE_LOSS = ("value_loss", "value_clip_fraction", "value_mean", "explained_variance", *UPDATE)
MISMATCH = ("log_q_mean", "log_q_max", "exp_abs_log_q", "k3", "ess", "correlation")
ROLLOUT = ("length", "truncated", "entropy", "staleness", "staleness_max", "turns", "failed_episodes", "undecided_groups",
           "zero_variance", "unique", "distinct_2", "repetition", "ended", "in_flight", "valid", "masked")  # fmt: skip
ROW_LOSS = (
    *("loss", "nll", "kl", "shift", "accuracy", "margin", "positive_fraction", "router_aux"),
    *(f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy", "desirable", "undesirable")),
    *("logprobs/chosen", "logprobs/rejected", "log_odds_ratio", "odds_ratio_loss"),
    *("agreement", "divergence", "divergence/*", "logprob_gap", "aligned"),
)
"""Metrics of the losses of SFT, reward models, preferences and distillation."""


def step_metrics(rewards: RewardsConfig, *, custom_loss: bool) -> tuple[str, ...]:
    """List the metrics of a step of policy optimization; a `custom_loss` may log any name below `policy/`."""
    terms = components(rewards)
    return (
        *(f"reward/{name}" for name in ("mean", "std", "greedy", "zero_variance_groups")),
        *(f"kl/{name}" for name in ("coef", "per_token", "per_sequence", "k3")),
        *(f"policy/{name}" for name in (("*",) if custom_loss else POLICY_LOSS)),
        *(f"value/{name}" for name in VALUE_LOSS),
        *(f"mismatch/{name}" for name in MISMATCH),
        *(f"rollout/{name}" for name in ROLLOUT),
        *(f"reward_{kind}/{name}" for kind in ("component", "constant", "failed") for name in terms),
        *(
            "ptx/nll",
            "band/inside",
            "band/answered",
            "teacher/kl",
            "teacher/kl/*",
            "reward_extra/*",
            "episode/*",
            "source/*",
        ),
    )


def evaluation_metrics(rewards: RewardsConfig, independent: RewardsConfig | None) -> tuple[str, ...]:
    """List the metrics of an evaluation on held-out prompts during policy optimization."""
    scored = {"reward": rewards} | ({} if independent is None else {"independent": independent})
    return (
        *("eval/length", "eval/truncated", "eval/unique"),
        *(f"eval/{name}/{figure}" for name in scored for figure in ("mean", "stderr")),
        *(f"eval/{name}_component/{term}" for name, config in scored.items() for term in components(config)),
    )


def components(rewards: RewardsConfig) -> list[str]:
    """The names of the parts of a reward: its terms, and penalties if it has any."""
    return [*rewards.terms, *["truncated"] * bool(rewards.truncated), *["overlong"] * bool(rewards.overlong)]


def is_named(metric: str, known: Iterable[str]) -> bool:
    """Whether `metric` is among the `known` names.

    >>> is_named("reward_extra/mine/hits", ["reward_extra/*"]), is_named("kl/k4", ["kl/k3"])
    (True, False)
    """
    return any(metric == name or ("*" in name and _pattern(name).fullmatch(metric)) for name in known)


def remedy_of(metric: str, known: Collection[str], *, shown: int = 40) -> str:
    """The remedy for a metric that is not in `known`: the nearest name, or all of them.

    >>> remedy_of("kl/k4", ["kl/k3", "reward/mean"])
    'did you mean kl/k3?'
    """
    near = nearest(metric, list(known))
    if near.startswith("did you mean"):
        return near
    names: Sequence[str] = sorted(known)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"choose one of {', '.join(names[:shown])}{more}"


@lru_cache(maxsize=1024)
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, name.split("*"))))


# ---------------------------------------------------------------- monitors

Monitor = Annotated[
    Band | Drift | Collapse | OverOptimization | LogprobMismatch | KLEstimate, Field(discriminator="type")
]


class HeldOutConfig(Config):
    """Evaluation of the policy on held-out prompts every few steps, with the best checkpoint kept."""

    every: int = Field(10, ge=1)
    """Number of steps between two evaluations; the first is before the first step, the last after the last one."""
    prompts: int = Field(64, ge=3)
    """Number of prompts that are held out of the training prompts by their content; the same in every run on the data."""
    samples: int = Field(1, ge=1)
    """Number of answers per held-out prompt, with the same seeds at every evaluation."""
    independent: Rewards | None = None
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
        """The metric by which the best checkpoint is chosen."""
        return self.metric or (INDEPENDENT if self.independent else PROXY)


def check_watched(
    evaluate: HeldOutConfig | None,
    monitors: tuple[Monitor, ...],
    rewards: RewardsConfig,
    *,
    custom_loss: bool,
    uses_reference: bool,
    uses_values: bool,
    uses_teachers: bool,
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
                f'{where}.action = "rollback": ahead.type = {late!r} has answers of the rejected policy on their way; remove '
                '[ppo.ahead], or choose "stop"'
            )
        if monitor.action != "warn" and evaluate is None:
            raise ValueError(
                f"{where}.action = {monitor.action!r}: the checkpoint to return to is chosen by evaluations, and there are "
                'none; add [ppo.evaluate], or choose "warn"'
            )
        for name in monitor.reads():
            missing = _never_logged(
                name, evaluate, uses_reference=uses_reference, uses_values=uses_values, uses_teachers=uses_teachers
            )
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
    acts = any(monitor.action != "warn" for monitor in monitors)
    chooses = evaluate is not None and (evaluate.export == "best" or evaluate.patience > 0 or acts)
    if evaluate and chooses and not rewards.terms and evaluate.best_by.startswith("eval/reward"):
        raise ValueError(
            f"evaluate.metric = {evaluate.best_by!r}: there is no term of rewards, so that each answer earns 0 and the first "
            'checkpoint, without training, would be the best; add evaluate.independent, or set evaluate.export = "last" without '
            "patience and with monitors that warn"
        )
    if evaluate and evaluate.metric and not is_named(evaluate.metric, evaluations):
        near = remedy_of(evaluate.metric, evaluations)
        raise ValueError(f"evaluate.metric = {evaluate.metric!r}: evaluations have no such metric; {near}")


def _never_logged(
    name: str, evaluate: HeldOutConfig | None, *, uses_reference: bool, uses_values: bool, uses_teachers: bool
) -> str:
    """The reason why a metric is never logged, with the remedy; "" if it may be logged."""
    if name.startswith("kl/") and not uses_reference:
        return "because there is no reference; set kl.coef above 0"
    if name.startswith("value/") and not uses_values:
        return 'because there is no value model; use advantage = "gae"'
    if name.startswith("teacher/") and not uses_teachers:
        return "because there are no teachers; add [ppo.distill]"
    if name.startswith("eval/") and evaluate is None:
        return "because nothing is evaluated; add [ppo.evaluate]"
    if name.startswith("eval/independent") and evaluate is not None and evaluate.independent is None:
        return "because there is no independent reward; add [ppo.evaluate.independent]"
    return ""
