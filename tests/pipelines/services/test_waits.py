"""Whether a run that waits may go on, and the notes on it: kept in the state folder, checked by a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.services.waits import answers_awaited, forget_condition, may_go_on, met, note_condition, waiting_runs
from rlhf_core.annotation.people import condition
from rlhf_core.annotation.proposing import Comparison, write_comparisons
from rlhf_core.config.annotators import FileAnnotator
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.types import Message


def test_a_run_goes_on_when_one_of_its_questions_is_answered(store):
    decisions = GateDecisions(store.shared)
    questions = [Question(gate=name, condition={"after": "sft"}, digest="d1", run="night") for name in ("a", "b", "c")]
    asked = [decisions.ask(question, run="night", links={}) for question in questions[:2]]
    condition = answers_awaited([question.id for question in questions], store.root)
    assert not may_go_on(condition, uri="")
    decisions.decide(asked[1], "reject", reason="no")
    assert may_go_on(condition, uri="")


@pytest.fixture
def waits(tmp_path) -> dict[str, Any]:
    """Return the condition of a stage that waits for one judgment in a file."""
    write_comparisons(tmp_path / "asked", [Comparison("c1", (Message("user", "Hi"),), "", "t", "a", "b", "p", "p")])
    return condition(FileAnnotator(folder=str(tmp_path / "exchange")), tmp_path / "asked", name="x")


def judge(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "exchange" / "x"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "judgments.jsonl").write_text(line)


def test_a_note_outlives_the_process_that_wrote_it_and_is_met_when_people_are_done(home, tmp_path, waits):
    assert waiting_runs(home) == []
    note_condition(home, "run-1", waits)
    note_condition(home, "run-2", waits | {"name": "y"})
    assert waiting_runs(home) == ["run-1", "run-2"] and met(home, waiting_runs(home)) == []
    judge(tmp_path, json.dumps({"id": "c1", "choice": "tie"}))
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pipelines.services.waits", "run-1", "run-2", "unknown"],
        env=os.environ | {"RLHF_HOME": str(home.root)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == "run-1\n"
    forget_condition(home, "run-1")
    forget_condition(home, "run-1")
    assert waiting_runs(home) == ["run-2"]


def test_a_half_edited_file_is_not_met_and_is_logged(home, tmp_path, waits, caplog):
    note_condition(home, "run-1", waits)
    judge(tmp_path, "nonsense\n")
    assert met(home, ["run-1"]) == []
    assert "flow run run-1" in caplog.text and "is not JSON" in caplog.text
