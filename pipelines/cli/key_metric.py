"""Choose the most informative metric of a stage, for one column of a table."""

from __future__ import annotations

from collections.abc import Mapping

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
    results = {name: value for name, value in metrics.items() if "before" not in name.split("/")}
    for wanted in KEY_METRICS:
        for name, value in results.items():
            if name == wanted or name.endswith(f"/{wanted}"):
                return f"{wanted} {value:.4g}"
    return ""
