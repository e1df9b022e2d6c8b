"""Write the run's name, headline metrics and description to the tracker."""

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.execution.executor import StageOutcome
from rlhf_core.secrets.redaction import HIDDEN, hidden
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef

# ---------------------------------------------------------------- measures

REPORT = "report.json"
OF_POLICIES = ("gold", "reward_model", "win_rate", "kl", "tokens")
"""Measures of a policy in the report of `evaluate`, the most informative first."""
LOW, HIGH, PROMPTS = "_low", "_high", "_prompts"
"""Ends of the names of metrics that are the interval of another one, and the number of prompts that it is of."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A number with its interval; without one, `low` and `high` are the number.

    >>> str(Measure(0.5, 0.4, 0.6)), str(Measure(3.0, 3.0, 3.0))
    ('0.5 [0.4, 0.6]', '3')
    """

    mean: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        return self.low < self.high

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.mean)

    def __str__(self) -> str:
        if not self.is_finite:
            return "not finite"
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]" if self.has_interval else f"{self.mean:.3g}"


def stage_measures(store: ArtifactStore, ref: ArtifactRef, metrics: Mapping[str, float]) -> dict[str, Measure]:
    """Return the measures of a finished stage: of each policy, if it compares policies, and the metrics of its record."""
    return of_metrics(metrics) | of_report(read_report(store.path(ref)))


def of_metrics(metrics: Mapping[str, float]) -> dict[str, Measure]:
    """Return the metrics of a record, those called `<name>_low` and `<name>_high` as the interval of `<name>`.

    >>> of_metrics({"accuracy": 0.7, "accuracy_low": 0.6, "accuracy_high": 0.8})
    {'accuracy': Measure(mean=0.7, low=0.6, high=0.8)}
    """
    bounds = {name + end for name in metrics for end in (LOW, HIGH, PROMPTS)}
    return {
        name: Measure(value, metrics.get(name + LOW, value), metrics.get(name + HIGH, value))
        for name, value in metrics.items()
        if name not in bounds
    }


def of_report(report: Mapping[str, Any]) -> dict[str, Measure]:
    """Return `<policy>/<measure>` of every policy in the report of `evaluate`; nothing for other reports."""
    rows = report.get("policies")
    if not isinstance(rows, Mapping):
        return {}
    return {
        f"{policy}/{name}": _measure(row[name]) for policy, row in rows.items() for name in OF_POLICIES if name in row
    }


def _measure(value: Mapping[str, float]) -> Measure:
    low, high = (value["low"], value["high"]) if "low" in value else (value["mean"], value["mean"])
    return Measure(value["mean"], low, high)


def read_report(folder: Path) -> dict[str, Any]:
    """Return the content of the report in an artifact's folder; {} if there is none."""
    path = folder / REPORT
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return report


# ---------------------------------------------------------------- summary

_HELD_OUT = tuple(f"held_out/{name}" for name in ("accuracy", "accuracy_low", "accuracy_high", "ece"))
HEADLINES = (*_HELD_OUT, "reward/mean", "kl/per_sequence", "eval/loss")
"""Metrics of a stage's record that are repeated on the pipeline's run, beside those of the policies."""
PAGE = "report.html"
LONGEST_OVERRIDE, LONGEST_NAME = 40, 160
_REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in the name of a metric."""


def shown_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides as they may be shown and kept: without those of `[notify]`, and with secrets hidden.

    >>> shown_overrides(["seed=18", "notify.url=https://host/T0/x", 'ppo.rewards.terms.judge.api_key="hunter2"'])
    ['seed=18', 'ppo.rewards.terms.judge.api_key=***']
    """
    return [_without_secrets(text) for text in overrides if _key(text).partition(".")[0] != "notify"]


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _without_secrets(override: str) -> str:
    key, _, written = override.partition("=")
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:  # a bare word is a text
        value = written.strip()
    if isinstance(value, str):
        safe = hidden(_key(override), value)
        return override if safe == value else f"{key}={safe}"
    return override if hidden(_key(override), value) == value else f"{key}={HIDDEN}"


def run_name(name: str, overrides: Sequence[str], token: str) -> str:
    """Return the name of a tracking run: the profile's, its overrides, and a part of the run's own token.

    >>> run_name("tiny", ["ppo.kl_coef=0.1"], "3f2a91")
    'tiny ppo.kl_coef=0.1 (3f2a)'
    """
    shown = [
        text if len(text) <= LONGEST_OVERRIDE else f"{text[: LONGEST_OVERRIDE - 3]}..."
        for text in shown_overrides(overrides)
    ]
    title = " ".join([name, *shown])[:LONGEST_NAME]
    return f"{title} ({token[:4]})" if token else title


def headline_metrics(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> dict[str, float]:
    """Return the numbers by which runs are compared: of each policy and model, with intervals, and the costs."""
    found: dict[str, float] = {}
    for label, outcome in outcomes.items():
        numbers = {name: outcome.metrics[name] for name in HEADLINES if name in outcome.metrics}
        for name, measure in of_report(read_report(store.path(outcome.ref))).items():
            numbers[name] = measure.mean
            if measure.has_interval:
                numbers |= {name + LOW: measure.low, name + HIGH: measure.high}
        found |= {_REFUSED.sub("", f"{label}/{name}"): value for name, value in numbers.items()}
    hits = [label for label, outcome in outcomes.items() if outcome.decision.action == "HIT"]
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    return found | {
        "run/hits": float(len(hits)),
        "run/computed": float(len(outcomes) - len(hits)),
        "run/hours": seconds / 3600,
    }


def headline(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> str:
    """Return the number that says most about a run: of the last policy that was compared, or of the last stage.

    "" if no stage has one of `HEADLINES`.
    """
    for label, outcome in reversed(list(outcomes.items())):
        measures = of_report(read_report(store.path(outcome.ref)))
        last = next(reversed(measures), "").rpartition("/")[0]
        for name, measure in measures.items():
            if name.startswith(f"{last}/"):
                return f"{name.replace('/', ' ')} {measure}"
        for name in HEADLINES:
            if name in outcome.metrics:
                return f"{label} {name} {outcome.metrics[name]:.4g}"
    return ""


def description(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> str:
    """Return, in Markdown, every finished stage with a link to the tracking run that made it, and where reports are."""
    lines = []
    for label, outcome in outcomes.items():
        page, folder = outcome.tracking_url, store.path(outcome.ref)
        name = f"[{label}]({page})" if page else label
        line = f"- {name}: {outcome.decision.action}, `{outcome.ref.digest[:12]}`"
        if (folder / REPORT).is_file() and (folder / PAGE).is_file():
            line += f", [report]({page}/artifacts/{PAGE})" if page else ""
            line += f" in `{folder / PAGE}`"
        lines.append(line)
    return "\n".join(lines)
