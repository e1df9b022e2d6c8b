"""Choose the most informative metric of a stage, for one column of a table."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

KEY_METRICS = (
    "accuracy",
    "eval/accuracy",
    "eval/loss",
    "eval/token_loss",
    "reward/mean",
    "loss",
    "rollouts",
    "generations",
    "pairs",
    "demonstrations",
)
"""Ends of metric names, the most informative first; the first one that a stage has is shown."""


def key_metric(metrics: Mapping[str, float]) -> str:
    """Return `name value` of the most informative metric of a stage, or "".

    While a stage runs, its label precedes the name. Metrics measured `before` training are ignored, as they are no
    result.
    """
    name = min(metrics, key=_rank, default="")
    rank = _rank(name)
    return f"{KEY_METRICS[rank]} {metrics[name]:.4g}" if rank < len(KEY_METRICS) else ""


@lru_cache(maxsize=4096)  # a list of runs asks about the same names ten thousand times
def _rank(name: str) -> int:
    """Return the place in KEY_METRICS of the end of a metric's name; beyond the last if it is none of them."""
    if "before" not in name.split("/"):
        for rank, wanted in enumerate(KEY_METRICS):
            if name == wanted or name.endswith(f"/{wanted}"):
                return rank
    return len(KEY_METRICS)
