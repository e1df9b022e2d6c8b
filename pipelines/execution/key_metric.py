"""Choose the most informative metric of a stage, for one column of a table."""

from collections.abc import Mapping
from functools import lru_cache

from rlhf_core.errors import readable

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

DROPPED = "dropped/all"
"""Metric of `prepare_data` that is shown together with its rows."""


def key_metric(metrics: Mapping[str, float]) -> str:
    """Format the most informative metric of a stage as `name value`, or "".

    While a stage runs, its label precedes the name. Metrics measured `before` training are ignored, since they do not
    describe its result.
    """
    name = min(metrics, key=metric_rank, default="")
    rank = metric_rank(name)
    dropped = f", dropped {metrics[DROPPED]:,.0f}" if metrics.get(DROPPED) else ""
    return f"{KEY_METRICS[rank]} {readable(metrics[name])}{dropped}" if rank < len(KEY_METRICS) else ""


@lru_cache(maxsize=4096)  # a list of runs looks up the same names ten thousand times
def metric_rank(name: str) -> int:
    """Index in KEY_METRICS of the end of a metric's name; beyond the last if it is none of them."""
    if "before" not in name.split("/"):
        for rank, wanted in enumerate(KEY_METRICS):
            if name == wanted or name.endswith(f"/{wanted}"):
                return rank
    return len(KEY_METRICS)
