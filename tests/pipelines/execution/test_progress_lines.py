"""The lines of a run in Prefect's log: those of a terminal, and nothing is kept from the display."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.execution import progress_lines
from pipelines.execution.executor import Listeners, Silent
from pipelines.execution.progress_lines import ProgressLines
from pipelines.services.running import wait_for
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.stopping import StageStopped

RUN = Decision("RUN", "first run", "k" * 64, None)


class Noted(Silent):
    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in ("planned", "started", "progress", "metrics", "finished", "failed"):
            return lambda *_: self.events.append(name)
        return super().__getattribute__(name)


def test_the_log_has_the_lines_of_a_terminal_and_the_display_gets_every_event(monkeypatch, caplog):
    monkeypatch.setattr(progress_lines.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(progress_lines.logger, "propagate", False)
    monkeypatch.setattr(progress_lines, "PROGRESS_EVERY_S", 1e9)
    display = Noted()
    lines = Listeners(ProgressLines(), display)
    with caplog.at_level(logging.INFO, logger=progress_lines.logger.name):
        lines.planned("sft", RUN)
        lines.started("sft", RUN)
        for step in range(3):
            lines.progress("sft", step, 9, "loss 2.0")
        lines.metrics("sft", 1, {"sft/loss": 2.0})
        lines.finished("sft", RUN, {"eval/loss": 1.5}, 3.0)
        lines.finished("dpo", Decision("HIT", "made", "k" * 64, None), {}, 0.0)
        lines.failed("ppo", ValueError("no"))
        lines.failed("ppo", StageStopped("by a signal"))
    assert [record.getMessage() for record in caplog.records] == [
        "sft: RUN: first run",
        "sft: 0/9 loss 2.0",
        "sft: done in 3.0 s  eval/loss 1.5",
        "ppo: FAILED: ValueError",
        "ppo: stopped",
    ]
    expected = ["planned", "started", "progress", "progress", "progress", "metrics", "finished", "finished", "failed"]
    assert display.events == [*expected, "failed"]


FLOW = """
import logging
from prefect import flow
from prefect.context import FlowRunContext
from pipelines.execution.progress_lines import ProgressLines
from rlhf_core.stage.decision import Decision

@flow(name="rlhf-pipeline", persist_result=False)
def run():
    logging.getLogger("pipelines").setLevel(logging.INFO)
    ProgressLines().started("sft", Decision("RUN", "first run", "k" * 64, None))
    return str(FlowRunContext.get().flow_run.id)

print(run())
"""


@pytest.mark.slow
def test_prefect_shows_the_lines_of_a_run(prefect_home, client, tmp_path):
    """Inside a flow, Prefect's own handler sends what our loggers log. Prefect reads its logging settings once a process."""
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    program = tmp_path / "flow.py"
    program.write_text(FLOW, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[done.stdout.split()[-1]]))  # they are sent in batches
    assert wait_for(lambda: "sft: RUN: first run" in [one.message for one in client.read_logs(wanted)], 60)
