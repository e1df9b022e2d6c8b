"""Show the progress of `rlhf run` (a live table on a terminal, plain lines elsewhere) and the table of results."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.cli.common import key_metric
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.stopping import RunHalted

STYLES = {
    "HIT": "green",
    "RUN": "cyan",
    "RESUME": "yellow",
    "ATTACH": "magenta",
    "BLOCKED": "red",
    "FAILED": "bold red",
}
PLAIN_PROGRESS_EVERY_S = 15.0


@dataclass
class Row:
    """A stage's row in the table."""

    decision: str
    reason: str
    state: str = "waiting"
    done: int = 0
    total: int = 0
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    seconds: float = 0.0


class PlainDisplay:
    """A `Listener` that prints one line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last: dict[str, float] = {}

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def planned(self, label: str, decision: Decision) -> None:
        return None

    def started(self, label: str, decision: Decision) -> None:
        self._line(label, f"{decision.action}: {decision.reason}")

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        now = time.monotonic()
        if label in self._last and now - self._last[label] < PLAIN_PROGRESS_EVERY_S:
            return
        self._last[label] = now
        self._line(label, f"{done}/{total} {message}")

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        return None

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        if decision.action != "HIT":
            self._line(label, f"done in {seconds:.1f} s  {key_metric(metrics)}".rstrip())

    def failed(self, label: str, error: BaseException) -> None:
        self._line(label, f"FAILED: {type(error).__name__}" if isinstance(error, Exception) else _end(error))

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", markup=False, highlight=False, soft_wrap=True)

    def _line(self, label: str, text: str) -> None:
        self._console.print(f"{label}: {text}", markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A table that is updated as stages progress, for terminals."""

    def __init__(self, console: Console) -> None:
        self._lock = threading.RLock()
        self._rows: dict[str, Row] = {}
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def planned(self, label: str, decision: Decision) -> None:
        with self._lock:
            self._rows[label] = Row(decision.action, decision.reason)

    def started(self, label: str, decision: Decision) -> None:
        with self._lock:
            self._rows[label] = Row(decision.action, decision.reason, state="running", began=time.monotonic())

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        with self._lock:
            row = self._rows[label]
            row.done, row.total, row.message = done, total, message

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._rows[label].metrics.update(values)

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        with self._lock:
            row = self._rows[label]
            row.decision, row.reason = decision.action, decision.reason
            row.state, row.seconds = "done", seconds
            row.metrics = dict(metrics)

    def failed(self, label: str, error: BaseException) -> None:
        with self._lock:
            row = self._rows[label]
            row.state, row.decision = (
                ("failed", "FAILED") if isinstance(error, Exception) else (_end(error), row.decision)
            )
            row.seconds = time.monotonic() - row.began if row.began else 0.0

    def warn(self, text: str) -> None:
        self._live.console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)

    def _render(self) -> RenderableType:
        with self._lock:
            table = Table(box=None, pad_edge=False, expand=False)
            table.add_column("stage", no_wrap=True)
            table.add_column("decision", no_wrap=True)
            table.add_column("progress", width=24)
            table.add_column("time", justify="right", no_wrap=True)
            table.add_column("", overflow="ellipsis", no_wrap=True, max_width=52)
            for label, row in self._rows.items():
                table.add_row(*_cells(label, row))
            return table


ENDS = {"Waiting": "waiting for people", "Blocked": "blocked by a gate", "OverBudget": "over budget"}
"""State of a halted run -> its text on the display."""


def _end(error: BaseException) -> str:
    return ENDS[error.state] if isinstance(error, RunHalted) else "stopped"


def _cells(label: str, row: Row) -> tuple[RenderableType, ...]:
    decision = Text(row.decision, style=STYLES[row.decision] if row.state != "waiting" else "dim")
    if row.state == "waiting":
        return Text(label, style="dim"), decision, "", "", Text(row.reason, style="dim")
    if row.state == "done":
        remark = key_metric(row.metrics) if row.decision != "HIT" else row.reason
        shown = "" if row.decision == "HIT" else f"{row.seconds:.1f} s"
        return Text(label), decision, Text("done", style="green"), shown, Text(remark)
    seconds = time.monotonic() - row.began if row.state == "running" else row.seconds
    bar = ProgressBar(total=row.total, completed=row.done, width=24) if row.total else Text(row.state)
    remark = " ".join(part for part in (key_metric(row.metrics), row.message or row.reason) if part)
    return Text(label, style="bold"), decision, bar, f"{seconds:.0f} s", Text(remark)


def open_display(console: Console) -> PlainDisplay | LiveDisplay:
    """Return the display for the console: live on a terminal, plain otherwise."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def decisions_table(rows: list[tuple[str, Decision]], *, wide: bool) -> Table:
    """Return the plan of a pipeline as a table."""
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "decision", "why", "key"):
        table.add_column(name, no_wrap=name != "why" or wide)
    for label, decision in rows:
        action = Text(decision.action, style=STYLES[decision.action])
        table.add_row(Text(label), action, Text(decision.reason), decision.key[:12])
    return table


COLUMNS = {
    "gold": "gold reward",
    "reward_model": "RM score",
    "kl": "KL",
    "tokens": "tokens",
    "entropy": "entropy",
    "win_rate": "win rate",
}
"""Measure in `report.json` -> heading. A measure that no policy has gets no column."""


def results_table(report: Mapping[str, Any]) -> Table:
    """Return the comparison of the policies in `report.json` as a table."""
    rows = report["policies"]
    shown = {measure: title for measure, title in COLUMNS.items() if any(measure in row for row in rows.values())}
    title = f"held-out prompts: mean [{report['settings']['level']:.0%} interval]; win rate against the parent"
    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="dim")
    table.add_column("policy", no_wrap=True)
    for title in shown.values():
        table.add_column(title, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(Text(name), *(_measure(measure, row[measure]) if measure in row else "" for measure in shown))
    return table


def _measure(name: str, value: Any) -> str:
    if not isinstance(value, Mapping):
        return f"{value:.2f}"
    if name == "kl":
        return f"{value['mean']:.2f}" if value["kind"] == "estimate" else f"<= {value['mean']:.2f}"
    if name == "tokens":
        return f"{value['mean']:.1f}"
    if name == "reward_model":
        return f"{value['mean']:.2f}"
    return (
        f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]" if "low" in value else f"{value['mean']:.2f}"
    )
