"""Name what policy optimization and training on rows measure, so that a misspelt metric is refused before they run.

`*` in a name stands for any text: what users' functions log. A name that a run may have is among them; whether it has it
depends on data, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from rlhf_core.config.rewards import RewardsConfig
from rlhf_core.errors import nearest

UPDATE = ("loss", "grad_norm", "learning_rate", "skipped", "router_aux")
"""Of every optimizer step."""
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
"""Of the losses of SFT, reward models, preferences and distillation."""


def step_metrics(rewards: RewardsConfig, *, custom_loss: bool) -> tuple[str, ...]:
    """Return the metrics of a step of policy optimization; those of a `custom_loss` may have any name below `policy/`."""
    terms = components(rewards)
    return (
        *(f"reward/{name}" for name in ("mean", "std", "greedy", "zero_variance_groups")),
        *(f"kl/{name}" for name in ("coef", "per_token", "per_sequence", "k3")),
        *(f"policy/{name}" for name in (("*",) if custom_loss else POLICY_LOSS)),
        *(f"value/{name}" for name in VALUE_LOSS),
        *(f"mismatch/{name}" for name in MISMATCH),
        *(f"rollout/{name}" for name in ROLLOUT),
        *(f"reward_{kind}/{name}" for kind in ("component", "constant", "failed") for name in terms),
        *("ptx/nll", "reward_extra/*", "episode/*"),
    )


def evaluation_metrics(rewards: RewardsConfig, independent: RewardsConfig | None) -> tuple[str, ...]:
    """Return the metrics of an evaluation on held-out prompts during policy optimization."""
    scored = {"reward": rewards} | ({} if independent is None else {"independent": independent})
    return (
        *("eval/length", "eval/truncated", "eval/unique"),
        *(f"eval/{name}/{figure}" for name in scored for figure in ("mean", "stderr")),
        *(f"eval/{name}_component/{term}" for name, config in scored.items() for term in components(config)),
    )


def components(rewards: RewardsConfig) -> list[str]:
    """Return the names of the parts of a reward: its terms, and penalties if there are any."""
    return [*rewards.terms, *["truncated"] * bool(rewards.truncated), *["overlong"] * bool(rewards.overlong)]


def is_named(metric: str, known: Iterable[str]) -> bool:
    """Return whether `metric` is among the `known` names.

    >>> is_named("reward_extra/mine/hits", ["reward_extra/*"]), is_named("kl/k4", ["kl/k3"])
    (True, False)
    """
    return any(metric == name or ("*" in name and _pattern(name).fullmatch(metric)) for name in known)


def remedy_of(metric: str, known: Collection[str], *, shown: int = 40) -> str:
    """Return what to do about a metric that is not among `known`: the nearest name, or all of them.

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
