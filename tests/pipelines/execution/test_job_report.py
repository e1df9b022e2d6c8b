from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution import ray_job
from pipelines.execution.ray_job import (
    PROGRESS,
    JobOutcome,
    Reporter,
    Watcher,
    error_of,
    failure,
    read_outcome,
    write_outcome,
)
from rlhf_core.errors import RewardError, RlhfError
from rlhf_core.stage.decision import Decision
from rlhf_core.store.layout import write_json
from tests.support.listener import Notes

RUN = Decision("RUN", "first run", "ab", None)
ATTACH = Decision("ATTACH", "Ray job x is computing it", "ab", None)


def watched(folder: Path, decision: Decision) -> tuple[Reporter, Watcher, Notes, list[tuple[int, int, str]]]:
    notes: Notes = Notes()
    shown: list[tuple[int, int, str]] = []
    watcher = Watcher(folder, "sft", notes, lambda *progress: shown.append(progress), decision=decision)
    return Reporter(folder), watcher, notes, shown


def test_what_the_job_tells_is_passed_on_once(tmp_path: Path) -> None:
    reporter, watcher, notes, shown = watched(tmp_path, RUN)
    assert watcher.poll() is None and notes.events == []
    reporter.started("sft", RUN)  # the person knows that one
    resumed = Decision("RESUME", "from step 3 of attempt 1", "ab", 3)
    reporter.progress("sft", 1, 9, "training")
    reporter.metrics("sft", 1, {"sft/loss": 2.0})
    reporter.started("sft", resumed)
    watcher.poll()
    watcher.poll()
    assert notes.events == [("started", "sft", "RESUME"), ("metrics", "sft", 1), ("progress", "sft", 1, 9)]
    assert shown == [(1, 9, "training")] and watcher.decision == resumed


def test_who_attached_is_not_told_why_the_job_runs(tmp_path: Path) -> None:
    reporter, watcher, notes, _ = watched(tmp_path, ATTACH)
    reporter.started("sft", RUN)
    watcher.poll()
    assert notes.events == [] and watcher.decision == ATTACH


def test_warnings_of_the_job_reach_the_log_of_the_flow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reporter, watcher, _, _ = watched(tmp_path, RUN)
    reporter.emit(logging.makeLogRecord({"msg": "trainer died; retrying from step %d", "args": (40,)}))
    reporter.finished("sft", RUN, {}, 1.0)
    watcher.poll()
    assert caplog.messages == ["sft: trainer died; retrying from step 40"]


def test_progress_is_written_now_and_then_and_the_last_of_it_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def write(path: Path, value: Mapping[str, Any], *, durable: bool) -> None:
        written.append(path)
        write_json(path, value, durable=durable)

    monkeypatch.setattr(ray_job, "write_json", write)
    reporter, watcher, _, shown = watched(tmp_path, RUN)
    for step in range(1, 1001):
        reporter.progress("sft", step, 1000, "")
    while not shown or shown[-1][0] < 1000:  # though nothing more is told
        watcher.poll()
        time.sleep(0.01)
    assert len(written) < 10


def test_a_folder_that_cannot_be_written_costs_the_job_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROGRESS).mkdir()
    Reporter(tmp_path).started("sft", RUN)
    assert "progress is not shown" in caplog.text


def test_an_outcome_comes_back_from_its_file(tmp_path: Path) -> None:
    assert read_outcome(tmp_path) is None
    outcome = JobOutcome("done", RUN, [{"prompt": "a"}])
    write_outcome(tmp_path, outcome)
    assert read_outcome(tmp_path) == outcome


def test_an_error_of_ours_comes_back_with_its_class_and_text() -> None:
    error = error_of(failure(RewardError("reward = nan: must be finite; mend it")), label="ppo", log="the log")
    assert type(error) is RewardError and str(error) == "reward = nan: must be finite; mend it"


def test_another_error_comes_back_with_its_name_and_where_to_read_more() -> None:
    error = error_of(failure(KeyError("loss")), label="ppo", log="`ray job logs x`")
    assert type(error) is RlhfError
    assert str(error) == "ppo: KeyError: 'loss'; for the traceback see `ray job logs x`"
