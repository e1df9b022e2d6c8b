"""Write the run's name, headline metrics and description to the tracker."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.execution.executor import StageOutcome
from rlhf_core.errors import readable
from rlhf_core.secrets.redaction import HIDDEN, hidden
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, PublishedRef

# ---------------------------------------------------------------- measures

REPORT = "report.json"
OF_POLICIES = ("gold", "reward_model", "win_rate", "kl", "tokens")
"""Measures of a policy in the report of `evaluate`, the most informative first."""
LOW, HIGH, PROMPTS = "_low", "_high", "_prompts"
"""Suffixes of metric names for the interval of another metric, and for the number of prompts behind it."""


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
        mean, low, high = (readable(one, 3) for one in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]" if self.has_interval else mean


def stage_measures(store: ArtifactStore, ref: ArtifactRef, metrics: Mapping[str, float]) -> dict[str, Measure]:
    """The measures of a finished stage: of each policy, if it compares policies, and the metrics of its record."""
    return of_metrics(metrics) | of_report(read_report(store.path(ref)))


def of_metrics(metrics: Mapping[str, float]) -> dict[str, Measure]:
    """Parse the metrics of a record; `<name>_low` and `<name>_high` become the interval of `<name>`.

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
    """`<policy>/<measure>` and `<policy>/source/<source>/<measure>` of the report of `evaluate`, {} for others."""
    found: dict[str, Measure] = {}
    for policy, row in report["policies"].items() if compares_policies(report) else ():
        parts = {"": row} | {f"source/{source}/": part for source, part in row.get("sources", {}).items()}
        found |= {f"{policy}/{of}{name}": one for of, part in parts.items() for name, one in of_row(part).items()}
    return found


def of_row(row: Mapping[str, Any]) -> dict[str, Measure]:
    """Parse the measures of a policy, or of its answers to the prompts of one source."""
    return {name: _measure(row[name]) for name in OF_POLICIES if name in row}


def _measure(value: Mapping[str, float]) -> Measure:
    low, high = (value["low"], value["high"]) if "low" in value else (value["mean"], value["mean"])
    return Measure(value["mean"], low, high)


def read_report(folder: Path) -> dict[str, Any]:
    """Read the report in an artifact's folder; {} if the file is missing."""
    path = folder / REPORT
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return report


# ---------------------------------------------------------------- results, as the terminal, Prefect and MLflow show them

COLUMNS = {
    "gold": "gold reward",
    "reward_model": "RM score",
    "kl": "KL",
    "tokens": "tokens",
    "entropy": "entropy",
    "win_rate": "win rate",
}
"""Measure in `report.json` -> heading. A measure that no policy has gets no column."""
_DECIMALS = {"tokens": 1}
_WITHOUT_INTERVAL = ("kl", "tokens", "reward_model")
"""Measures whose interval the table leaves out, so that it fits a terminal; the report has it."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts with its caption."""

    caption: str
    headings: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """The table in Markdown."""
        return f"{markdown_table(self.headings, self.rows)}\n\n{self.caption}"


def compares_policies(report: Mapping[str, Any]) -> bool:
    """Whether this is the report of `evaluate`, with a row per policy."""
    return isinstance(report.get("policies"), Mapping)


def results(report: Mapping[str, Any]) -> dict[str, Table]:
    """Tables of the comparison of policies in the report of `evaluate`: overall, and by source if there are several."""
    policies, interval = report["policies"], f"mean [{report['settings']['level']:.0%} interval]"
    shown = {measure: title for measure, title in COLUMNS.items() if any(measure in row for row in policies.values())}
    rows = [
        [name, *(_shown(measure, row[measure]) if measure in row else "" for measure in shown)]
        for name, row in policies.items()
    ]
    caption = f"held-out prompts: {interval}; win rate against the parent"
    tables = {"results": Table(caption, ["policy", *shown.values()], rows)}
    of_source = {name: row["sources"] for name, row in policies.items() if "sources" in row}
    return tables | ({"results_by_source": _by_source(of_source, interval)} if of_source else {})


def _by_source(policies: Mapping[str, Mapping[str, Mapping[str, Any]]], interval: str) -> Table:
    """A table of the first available measure, by policy and source."""
    measure = next(
        name for name in OF_POLICIES if any(name in part for row in policies.values() for part in row.values())
    )
    sources = list(dict.fromkeys(source for row in policies.values() for source in row))
    rows = [
        [name, *(_shown(measure, row[source][measure]) if measure in row.get(source, {}) else "" for source in sources)]
        for name, row in policies.items()
    ]
    return Table(f"{COLUMNS[measure]} by source, {interval}", ["policy", *sources], rows)


def _shown(measure: str, value: Any) -> str:
    decimals = _DECIMALS[measure] if measure in _DECIMALS else 2
    mean = value["mean"] if isinstance(value, Mapping) else value
    text = f"{round(mean, decimals) + 0.0:.{decimals}f}"  # adding 0.0 makes 0 of -0
    if not isinstance(value, Mapping):
        return text
    if measure == "kl" and value["kind"] != "estimate":
        return f"<= {text}"
    if measure in _WITHOUT_INTERVAL or "low" not in value:
        return text
    return f"{text} [{value['low']:.{decimals}f}, {value['high']:.{decimals}f}]"


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown.

    >>> print(markdown_table(["stage", "why"], [["sft", "a | b"]]))
    | stage | why |
    |---|---|
    | sft | a \\| b |
    """
    cells = [headings, ["---"] * len(headings), *([text.replace("|", "\\|") for text in row] for row in rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], lines[1].replace(" ", ""), *lines[2:]])


# ---------------------------------------------------------------- summary

_HELD_OUT = tuple(f"held_out/{name}" for name in ("accuracy", "accuracy_low", "accuracy_high", "ece"))
HEADLINES = (*_HELD_OUT, "reward/mean", "kl/per_sequence", "eval/loss")
"""Metrics of a stage's record that are repeated on the pipeline's run, in addition to the metrics of the policies."""
RESULT = "_result"
"""Prefix of the metrics of a run's result. It sorts before the labels of stages, and is the same in all runs."""
PAGE, GATE = "report.html", "gate.json"
LONGEST_OVERRIDE, LONGEST_NAME = 40, 160
_REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in the name of a metric."""


def shown_overrides(overrides: Sequence[str]) -> list[str]:
    """Overrides that may be shown and stored: `[notify]` is left out, and secrets are hidden.

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
    """Compose the name of a tracking run: the profile's, its overrides, and a part of the run's own token.

    >>> run_name("tiny", ["ppo.kl.coef=0.1"], "3f2a91")
    'tiny ppo.kl.coef=0.1 (3f2a)'
    """
    shown = [
        text if len(text) <= LONGEST_OVERRIDE else f"{text[: LONGEST_OVERRIDE - 3]}..."
        for text in shown_overrides(overrides)
    ]
    title = " ".join([name, *shown])[:LONGEST_NAME]
    return f"{title} ({token[:4]})" if token else title


def headline_metrics(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> dict[str, float]:
    """Numbers by which runs are compared: of the result, of each policy and model, and the costs."""
    found = _numbers(RESULT, _result(outcomes, store)[1])
    for label, outcome in outcomes.items():
        metrics = of_metrics({name: outcome.metrics[name] for name in HEADLINES if name in outcome.metrics})
        found |= _numbers(label, metrics | of_report(read_report(store.path(outcome.ref))))
    hits = [label for label, outcome in outcomes.items() if outcome.decision.action == "HIT"]
    seconds = sum(outcome.seconds for outcome in outcomes.values())
    return found | {
        "run/hits": float(len(hits)),
        "run/computed": float(len(outcomes) - len(hits)),
        "run/hours": seconds / 3600,
    }


def _numbers(prefix: str, measures: Mapping[str, Measure]) -> dict[str, float]:
    """Convert measures to metrics that a tracker accepts; the ends of intervals become separate metrics."""
    found: dict[str, float] = {}
    for name, measure in measures.items():
        found[name] = measure.mean
        if measure.has_interval:
            found |= {name + LOW: measure.low, name + HIGH: measure.high}
    return {_REFUSED.sub("", f"{prefix}/{name}"): value for name, value in found.items()}


def _result(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> tuple[str, dict[str, Measure]]:
    """Name and measures of the last policy that was compared, or of the last stage that has `HEADLINES`."""
    for label, outcome in reversed(list(outcomes.items())):
        report = read_report(store.path(outcome.ref))
        rows = report["policies"].items() if compares_policies(report) else ()
        measured = [(name, found) for name, row in rows if (found := of_row(row))]
        if measured:
            return measured[-1]
        metrics = {name: outcome.metrics[name] for name in HEADLINES if name in outcome.metrics}
        if metrics:
            return label, of_metrics(metrics)
    return "", {}


def run_headline(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> str:
    """Summarize the result of a run in a line, such as `ppo gold 3.49 [3.34, 3.64]; champion v1`.

    It is "" if no stage has a metric of `HEADLINES` and no stage published a policy.
    """
    name, measures = _result(outcomes, store)
    parts = [f"{name} {measure} {value}" for measure, value in list(measures.items())[:1]]
    for outcome in outcomes.values():
        if isinstance(outcome.ref, PublishedRef):
            registry = json.loads((store.path(outcome.ref) / GATE).read_text(encoding="utf-8"))["registry"]
            parts.append(f"{registry['aliases'][-1]} v{registry['version']}")
    return "; ".join(parts)


def description(outcomes: Mapping[str, StageOutcome], store: ArtifactStore) -> str:
    """Describe the run in Markdown: the result, its table, and every finished stage with a link to its tracking run."""
    result = run_headline(outcomes, store)
    parts = [f"**{result}**"] if result else []
    reports = (read_report(store.path(outcome.ref)) for outcome in outcomes.values())
    parts += [one.markdown() for report in reports if compares_policies(report) for one in results(report).values()]
    lines = []
    for label, outcome in outcomes.items():
        name = f"[{label}]({outcome.tracking_url})" if outcome.tracking_url else label
        lines.append(f"- {name}: {outcome.decision.action}, `{outcome.ref.digest[:12]}`")
    return "\n\n".join([*parts, "\n".join(lines)])
