"""Report a job's progress and outcome to the flow that waits for it, through files in a shared folder.

Each file is replaced as a whole, so a reader sees the old or the new one. The files outlive the job, the flow and the
cluster.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipelines.execution.listener import Listener
from rlhf_core.errors import RlhfError
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.stage.decision import Decision
from rlhf_core.store.layout import read_json, write_json

logger = logging.getLogger(__name__)

SPEC = "spec.json"
PROGRESS = "progress.json"
OUTCOME = "outcome.json"
WRITE_EVERY_S = 0.5
WARNINGS_KEPT = 50


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The end of a job. `samples` belong to a `done` stage, the error's class and text to a `failed` one.

    A stage that is `waiting` for people says in `error` for what, and in `condition` for other processes.
    """

    status: Literal["done", "failed", "waiting", "stopped"]
    decision: Decision | None = None
    samples: list[dict[str, str]] = field(default_factory=list)
    error_class: str = ""
    error: str = ""
    condition: dict[str, Any] = field(default_factory=dict)


def write_outcome(folder: Path, outcome: JobOutcome) -> None:
    """Write the outcome of the job, as its last action."""
    write_json(folder / OUTCOME, asdict(outcome))


def read_outcome(folder: Path) -> JobOutcome | None:
    """Return the outcome of the job; None if it still runs, or was killed before it could write one."""
    table = read_json(folder / OUTCOME)
    if table is None:
        return None
    decision = table["decision"]
    return JobOutcome(**(table | {"decision": None if decision is None else Decision(**decision)}))


class Reporter(logging.Handler):
    """The `Listener` of a job, which writes events to `progress.json`. As a log handler, it adds warnings to them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = folder / PROGRESS
        self._report = _empty_report()
        self._changing = threading.Lock()
        self._due: threading.Timer | None = None

    def planned(self, label: str, decision: Decision) -> None:
        return None

    def started(self, label: str, decision: Decision) -> None:
        with self._changing:
            self._report["decisions"].append(asdict(decision))
        self._write()

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        with self._changing:
            self._report["progress"] = [done, total, message]
            self._write_soon()

    def metrics(self, label: str, step: int, values: Mapping[str, float]) -> None:
        with self._changing:
            self._report["metrics"].update(values)
            self._report["step"] = step
            self._write_soon()

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        self._write()

    def failed(self, label: str, error: BaseException) -> None:
        self._write()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != __name__ and len(self._report["warnings"]) < WARNINGS_KEPT:
            self._report["warnings"].append(record.getMessage())

    def _write_soon(self) -> None:
        """Write the report within `WRITE_EVERY_S`, even if no event follows: the next step may take minutes."""
        if self._due is None:
            self._due = threading.Timer(WRITE_EVERY_S, self._write)
            self._due.daemon = True
            self._due.start()

    def _write(self) -> None:
        try:
            with self._changing:
                self._due = None
                write_json(self._path, self._report, durable=False)
        except OSError as error:  # a full disk must not fail the stage
            logger.warning("%s: %s; progress is not shown", self._path, error)


class Watcher:
    """A reader of a job's report that passes on what is new in it."""

    def __init__(
        self,
        folder: Path,
        label: str,
        listener: Listener,
        show_progress: Callable[[int, int, str], None],
        *,
        decision: Decision,
    ) -> None:
        self.decision = decision
        """The latest reported decision: the newest of the job, or our own to ATTACH."""
        self._folder = folder
        self._label = label
        self._listener = listener
        self._show_progress = show_progress
        self._seen = _empty_report()

    def poll(self) -> JobOutcome | None:
        """Pass on what the job has reported since the last call; return its outcome, None while it runs."""
        outcome = read_outcome(self._folder)  # first, so that nothing reported before the end is lost
        report = read_json(self._folder / PROGRESS)
        if report is not None and report != self._seen:
            self._pass_on(report)
            self._seen = report
        return outcome

    def _pass_on(self, report: dict[str, Any]) -> None:
        seen = self._seen
        for table in report["decisions"][len(seen["decisions"]) :]:
            self._decided(Decision(**table))
        for text in report["warnings"][len(seen["warnings"]) :]:
            logger.warning("%s: %s", self._label, text)
        if report["metrics"] != seen["metrics"]:
            self._listener.metrics(self._label, report["step"], report["metrics"])
        if report["progress"] not in (None, seen["progress"]):
            done, total, message = report["progress"]
            self._listener.progress(self._label, done, total, message)
            self._show_progress(done, total, message)

    def _decided(self, decision: Decision) -> None:
        if self.decision.action != "ATTACH" and decision != self.decision:
            self.decision = decision
            self._listener.started(self._label, decision)


def failure(error: Exception) -> JobOutcome:
    """Return the outcome of a job that ended with `error`."""
    return JobOutcome("failed", error_class=type(error).__name__, error=without_secrets(str(error)))


def error_of(outcome: JobOutcome, *, label: str, log: str) -> RlhfError:
    """Return the error of a failed job: an RlhfError keeps its class and text, any other error is named in the text.

    `log` says where the job's log is.
    """
    kinds = {kind.__name__: kind for kind in _family(RlhfError)}
    if outcome.error_class in kinds:
        return kinds[outcome.error_class](outcome.error)
    return RlhfError(f"{label}: {outcome.error_class}: {outcome.error}; for the traceback see {log}")


def _empty_report() -> dict[str, Any]:
    return {"decisions": [], "progress": None, "metrics": {}, "step": 0, "warnings": []}


def _family(kind: type[RlhfError]) -> list[type[RlhfError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in _family(child))]
