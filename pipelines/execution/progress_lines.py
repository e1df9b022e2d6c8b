"""Describe the events of a run as lines, for terminals, pipes and Prefect's log."""

import logging
import time
from collections.abc import Mapping

from pipelines.execution.executor import Listener
from pipelines.execution.key_metric import key_metric
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.stopping import RunHalted

logger = logging.getLogger(__name__)

PROGRESS_EVERY_S = 15.0


class ProgressLines(Listener):
    """Passes one line per event to `write`, by default to the log, which the flow run shares.

    A plan and metrics have no line: the decision comes with the start of a stage, and the most informative metric with
    its end.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        """Time of the last line about the progress of each stage."""

    def write(self, line: str) -> None:
        """Log a line."""
        logger.info("%s", line)

    def started(self, label: str, decision: Decision) -> None:
        self.write(f"{label}: {decision.action}: {decision.reason}")

    def progress(self, label: str, done: int, total: int, message: str) -> None:
        now = time.monotonic()
        if label not in self._last or now - self._last[label] >= PROGRESS_EVERY_S:
            self._last[label] = now
            self.write(f"{label}: {done}/{total} {message}")

    def finished(self, label: str, decision: Decision, metrics: Mapping[str, float], seconds: float) -> None:
        if decision.action != "HIT":
            self.write(f"{label}: done in {seconds:.1f} s  {key_metric(metrics)}".rstrip())

    def failed(self, label: str, error: BaseException) -> None:
        end = f"FAILED: {type(error).__name__}" if isinstance(error, Exception) else end_of(error)
        self.write(f"{label}: {end}")


ENDS = {"Waiting": "waiting for people", "Blocked": "blocked by a gate", "OverBudget": "over budget"}
"""State of a halted run -> its text on the display."""


def end_of(error: BaseException) -> str:
    """The text for a stage that was halted or stopped."""
    return ENDS[error.state] if isinstance(error, RunHalted) else "stopped"
