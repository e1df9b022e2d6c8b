"""Show the progress of `rlhf run` (a live table on a terminal, plain lines elsewhere) and the table of results."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipelines.cli.common import print_line, print_wrapped, printable
from pipelines.execution.executor import Listener
from pipelines.execution.key_metric import key_metric
from pipelines.execution.plan import DIGITS, Outlook, PlannedStage, duration
from pipelines.execution.progress_lines import ProgressLines, end_of
from pipelines.execution.summary import results
from rlhf_core.stage.decision import Decision

STYLES = {
    "HIT": "green",
    "RUN": "bold cyan",
    "RESUME": "yellow",
    "ATTACH": "magenta",
    "BLOCKED": "red",
    "FAILED": "bold red",
}
HEADING = ("decision", "stage", "key", "why (times in UTC)")
LEAST_REASON = 24
"""Columns from which a long reason of a plan wraps in its column."""
OWN_LINES = 10  # columns before a reason on separate lines
MOST_NOTES = 2  # of the hits that share a line of a plan


@dataclass
class StageRow:
    """A stage's row in the table."""

    decision: str
    reason: str
    engines: frozenset[str] = frozenset()
    """Engines that the stage needs, which may have to start."""
    expected: float | None = None
    """Seconds that the stage took last time."""
    state: str = "waiting"
    done: int = 0
    total: int = 0
    message: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    began: float = 0.0
    seconds: float = 0.0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began if self.state == "running" else self.seconds

    def left(self) -> float | None:
        """Seconds until the stage ends, at its current pace or else as long as last time; None if neither is known."""
        if self.decision == "HIT" or self.state not in ("waiting", "running"):
            return 0.0
        if self.state == "running" and 0 < self.done <= self.total:
            return self.elapsed * (self.total - self.done) / self.done
        return None if self.expected is None else max(0.0, self.expected - self.elapsed)


class PlainDisplay(ProgressLines):
    """A `Listener` that prints a line per event, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def expect(self, stages: Sequence[PlannedStage], found: Outlook) -> None:
        """Print how much is to be done."""
        print_line(str(found), to=self._console)

    def warn(self, text: str) -> None:
        print_line(f"warning: {text}", to=self._console)

    def write(self, line: str) -> None:
        print_line(line, to=self._console)


class LiveDisplay(Listener):
    """A table for terminals that is updated as stages progress. The decisions come first and are never cut."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.RLock()
        self._rows: dict[str, StageRow] = {}
        self._expected: Mapping[str, float | None] = {}
        self._engines: dict[str, frozenset[str]] = {}
        self._up: set[str] = set()
        """Engines that have worked already, so that no stage waits for them."""
        self._ended = False
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended = True
        self._live.stop()

    def expect(self, stages: Sequence[PlannedStage], found: Outlook) -> None:
        """Print how much is to be done; keep the engines and the last times of the stages for their rows."""
        self._engines = {stage.label: frozenset(stage.spec.engines) & ENGINES for stage in stages}
        self._expected = found.seconds
        self._console.print(str(found), markup=False, highlight=False)

    def planned(self, label: str, decision: Decision) -> None:
        with self._lock:
            self._rows[label] = StageRow(
                decision.action, decision.reason, self._engines.get(label, frozenset()), self._expected.get(label)
            )

    def started(self, label: str, decision: Decision) -> None:
        with self._lock:
            if label not in self._rows:
                self.planned(label, decision)
            row = self._rows[label]
            row.decision, row.reason = decision.action, decision.reason
            row.state, row.began = "running", time.monotonic()

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        with self._lock:
            row = self._rows[label]
            row.done, row.total, row.message = done, total, message
            self._up |= row.engines

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
            row.seconds = row.elapsed if row.began else 0.0
            row.state, row.decision = (
                ("failed", "FAILED") if isinstance(error, Exception) else (end_of(error), row.decision)
            )

    def warn(self, text: str) -> None:
        print_wrapped(f"warning: {text}", "yellow", to=self._console)

    def _render(self) -> RenderableType:
        with self._lock:
            if all(row.decision == "HIT" for row in self._rows.values()):
                return ""  # the line before the table has their number and the newest date
            width, height = self._console.size
            bar = WIDE_BAR if width >= WIDE else NARROW_BAR
            fixed = DECISION_WIDTH + bar + TIME_WIDTH + 4  # a space after each of the four columns before the remark
            label = min(max((len(label) for label in self._rows), default=0), width - fixed - LEAST_REMARK)
            table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), width=width)
            for name, size in (("decision", DECISION_WIDTH), ("stage", label), ("progress", bar), ("time", TIME_WIDTH)):
                justify: Literal["left", "right"] = "right" if name == "time" else "left"
                table.add_column(name, width=size, no_wrap=True, overflow="ellipsis", justify=justify)
            table.add_column("", width=width - fixed - label - 1, no_wrap=True, overflow="ellipsis")

            # After the end the table is whole, for reading back; before, it fits into the terminal.
            first, last = 0, len(self._rows)
            if not self._ended:
                first, last = _window(list(self._rows.values()), height - FRAME)
            for name, row in list(self._rows.items())[first:last]:
                # The end of a long label differs from the others'.
                name = name if len(name) <= label else f"\u2026{name[1 - label :]}"
                table.add_row(*self._cells(name, row, bar, width - fixed - label - 1))
            hidden = f"{first} stages above, {len(self._rows) - last} below; " if last - first < len(self._rows) else ""
            return table if self._ended else Group(table, Text(hidden + self._left(), style="dim"))

    def _left(self) -> str:
        """The remaining time, as far as known."""
        left = [row.left() for row in self._rows.values()]
        known = [seconds for seconds in left if seconds]
        unknown = sum(seconds is None for seconds in left)
        if not known:
            return f"{unknown} stage{'s' * (unknown > 1)} left, time unknown" if unknown else ""
        return f"about {duration(sum(known))} left" + (f", without {unknown} stages of unknown time" if unknown else "")

    def _cells(self, label: str, row: StageRow, bar: int, room: int) -> tuple[RenderableType, ...]:
        """The cells of a row, whose bar has `bar` columns and whose remark has `room`."""
        decision = Text(row.decision, style=STYLES[row.decision] if row.state != "waiting" else "dim")
        if row.state == "waiting":
            return decision, Text(label, style="dim"), "", "", Text(row.reason, style="dim")
        if row.state == "done":
            hit = row.decision == "HIT"
            fits = len(row.reason.partition(";")[0]) <= room  # a truncated date is worse than none
            remark = key_metric(row.metrics) if not hit else row.reason if fits else ""
            shown = "" if hit else f"{row.seconds:.1f} s"
            return decision, Text(label), Text("done", style="green"), shown, Text(remark)
        progress = self._phase(row)
        said = "" if progress == SAVING else row.message or row.reason
        remark = " ".join(part for part in (key_metric(row.metrics), said) if part)
        shown_progress = Text(progress) if progress else ProgressBar(total=row.total, completed=row.done, width=bar)
        return decision, Text(label, style="bold"), shown_progress, f"{row.elapsed:.0f} s", Text(remark)

    def _phase(self, row: StageRow) -> str:
        """Name of the current activity of a stage that has no progress bar; "" while it counts steps."""
        if row.state != "running":
            return row.state
        if row.total:
            return SAVING if row.done >= row.total else ""
        if row.decision in ("HIT", "ATTACH"):
            return "waiting" if row.decision == "ATTACH" else ""
        return "starting engines" if row.engines - self._up else "preparing"


ENGINES = frozenset({"trainer", "sampler"})
SAVING = "saving"
"""Phase of a stage after its last step: it writes its files, hashes them, and logs them."""
DECISION_WIDTH, TIME_WIDTH = 8, 7
NARROW_BAR, WIDE_BAR, WIDE = 16, 24, 100
"""Columns of a narrow bar, which has to hold `starting engines`, and of a wide bar; width of a terminal for the wide
bar."""
LEAST_REMARK = 12
FRAME = 3
"""Lines of the terminal in addition to the rows: heading, last line, and the cursor."""


def _window(rows: Sequence[StageRow], count: int) -> tuple[int, int]:
    """The first row to show and the one after the last, chosen around the first stage that has not ended."""
    if len(rows) <= count:
        return 0, len(rows)
    active = next((place for place, row in enumerate(rows) if row.state != "done"), len(rows))
    first = min(max(0, active - count // 3), len(rows) - count)
    return first, first + count


def open_display(console: Console) -> PlainDisplay | LiveDisplay:
    """Choose the display for the console: live on a terminal, plain otherwise."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def print_decisions(rows: Sequence[tuple[str, Decision]], console: Console) -> None:
    """Print the plan of a pipeline: a tree whose reasons wrap on a terminal, one line for each stage in a pipe."""
    if console.is_terminal:
        lines = list(_tree([(label.split("/"), decision) for label, decision in rows]))
        wide = max((len(name) for _, name, _, _ in lines), default=0)
        for action, name, key, why in [HEADING, *lines]:
            style = "bold" if action == HEADING[0] else STYLES.get(action, "")
            row = Text.assemble((f"{action:<8} ", style), f"{name:<{wide}} ")
            reason = _placed_reason(printable(why), key, begin=len(row), width=console.width)
            row.append(f"{key:<{DIGITS}} " if key else "", "dim").append(reason)
            row.rstrip()
            console.print(row, soft_wrap=True, highlight=False)
        return
    wide = max((len(label) for label, _ in rows), default=0)
    for label, decision in rows:
        line = f"{decision.action:<8} {label:<{wide}} {decision.key[:DIGITS] or '-':<{DIGITS}} {decision.reason}"
        print_line(line, to=console)


def _placed_reason(reason: str, key: str, *, begin: int, width: int) -> str:
    """Lay out a reason after its key, in lines that fit the terminal; no word is broken.

    The reason starts in the column of reasons. If it does not fit there, it starts in the column of keys if that is
    empty. If the column is narrow, or a word does not fit, the reason gets separate lines.
    """
    column = begin + DIGITS + 1
    if key or len(reason) <= width - column:
        gap = "" if key else " " * (DIGITS + 1)
    else:
        gap, column = "", begin
    room = width - column
    if len(reason) <= room:
        return gap + reason
    if room < LEAST_REASON or any(len(word) > room for word in reason.split()):
        return f"{gap}\n{_wrapped(reason, indent=OWN_LINES, width=width)}"
    return gap + _wrapped(reason, indent=column, width=width).lstrip()


def _wrapped(text: str, *, indent: int, width: int) -> str:
    margin = " " * indent
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


def _tree(
    rows: Sequence[tuple[Sequence[str], Decision]], indent: str = "", above: tuple[str, ...] = ()
) -> Iterator[tuple[str, str, str, str]]:
    """Action, name, key and reason of each line of a plan. If a part of the pipeline is all hits, it is one line.

    `above`: the parts around these rows, the innermost first. A reason that names a stage in such a part leaves out the
    name of the part.
    """
    for part, found in groupby(rows, lambda row: row[0][0]):
        members = list(found)
        if len(members) == 1:
            path, decision = members[0]
            reason = decision.reason.removeprefix("made ").replace(" UTC in ", ", ", 1)
            around = next((one for one in above if reason.startswith(f"after {one}")), "")
            yield (
                decision.action,
                indent + "/".join(path),
                decision.key[:DIGITS],
                reason.replace(f"after {around}", "after ", 1),
            )
        elif all(decision.action == "HIT" for _, decision in members):
            yield "HIT", indent + part, "", _hits([decision for _, decision in members])
        else:
            yield "", f"{indent}{part}/", "", ""
            # A stage may have the name of the part, as `evaluate` has.
            inner = f"{above[0] if above else ''}{part}/"
            yield from _tree([(path[1:] or path, one) for path, one in members], indent + "  ", (inner, *above))


def _hits(decisions: Sequence[Decision]) -> str:
    """The number of hits and their notes, such as changed code, which follow the date in a reason."""
    notes = list(dict.fromkeys(note for one in decisions for note in one.reason.split("; ")[1:]))
    more = [f"{len(notes) - MOST_NOTES} more notes"] if len(notes) > MOST_NOTES else []
    return "; ".join([f"{len(decisions)} hits", *notes[:MOST_NOTES], *more])


def results_tables(report: Mapping[str, Any], width: int) -> Group:
    """The comparison of the policies in `report.json` as tables. Intervals get lines below their means if needed."""
    tables = list[Table]()
    for found in results(report).values():
        columns = list(zip(found.headings, *found.rows, strict=True))
        if sum(max(map(len, column)) + 1 for column in columns) > width:
            of_policies, *measures = columns
            measures = [
                (head.replace(" ", "\n"), *(cell.replace(" [", "\n[") for cell in cells)) for head, *cells in measures
            ]
            columns = [of_policies, *measures]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=found.caption, title_justify="left")
        table.title_style = "dim"
        for number, (heading, *_) in enumerate(columns):
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for cells in zip(*(column[1:] for column in columns), strict=True):
            table.add_row(*map(Text, cells))
        tables.append(table)
    return Group(*tables)
