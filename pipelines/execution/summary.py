"""Say in the tracker what a run is and what came of it: its name, its headline numbers, its description."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence

from pipelines.execution.executor import StageOutcome
from pipelines.execution.measures import HIGH, LOW, REPORT, of_report, read_report
from rlhf_core.secrets.redaction import HIDDEN, hidden
from rlhf_core.store.artifacts import ArtifactStore

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
    """Return the name of a tracking run: the profile's, what was overridden, and a part of the run's own token.

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
