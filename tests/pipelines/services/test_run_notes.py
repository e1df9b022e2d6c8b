"""The lines of `rlhf runs`: their states, and the commands that go on with them."""

import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from pipelines.cli import store_lists
from pipelines.cli.main import main
from pipelines.services.home import Home
from pipelines.services.run_notes import RunNote, RunRecord, folder, new_note, run_records

FLOW = "0f9a8b7c-1111-2222-3333-444455556666"


def noted(home: Home, state: str, *, profile: str = "tiny/full", **changes: Any) -> RunRecord:
    fields = {"digest": "d", "overrides": [], "until": ""}
    given = {name: changes.pop(name, fields[name]) for name in fields}
    note = new_note(home, "tiny", profile=profile, store=home.store, **given)
    note.change(state=state, **changes)
    return note.record


@pytest.mark.parametrize(
    ("state", "changes", "command"),
    [
        ("Running", {}, ""),
        ("Completed", {}, ""),
        (
            "Waiting",
            {"message": "gate q: `rlhf approve tiny q --reason ...` or ..."},
            "rlhf approve tiny q --reason ...",
        ),
        ("Waiting", {"message": "0 of 1 judged", "flow_run": FLOW}, "rlhf resume 0f9a8b7c"),
        ("Failed", {"overrides": ["seed=3"]}, "rlhf run tiny/full --set seed=3"),
    ],
)
def test_the_command_that_goes_on_with_a_run(home, state, changes, command):
    assert noted(home, state, **changes).following == command


@pytest.mark.parametrize(
    ("state", "later", "found"),
    [
        ("Waiting", {}, "Closed"),
        ("Failed", {}, "Closed"),
        ("Running", {}, "Running"),
        ("Waiting", {"overrides": ["seed=3"], "digest": "e"}, "Waiting"),
        ("Waiting", {"overrides": ["publish=none"]}, "Closed"),  # the same configuration, in other words
        ("Waiting", {"digest": "e"}, "Closed"),  # the file was edited
        ("Waiting", {"profile": "tiny/rlvr", "digest": "e"}, "Waiting"),
        ("Waiting", {"until": "sft"}, "Waiting"),
        ("Waiting", {"state": "Failed"}, "Waiting"),
    ],
)
def test_a_run_is_closed_once_a_later_one_of_the_same_profile_has_finished(home, state, later, found):
    noted(home, state)
    note = new_note(home, "tiny", **{"profile": "tiny/full", "digest": "d", "overrides": [], "until": ""} | {
        name: value for name, value in later.items() if name != "state"
    }, store=home.store)  # fmt: skip
    assert note.finishes_another() is (found == "Closed" or "state" in later)
    noted(home, **{"state": "Completed", **later})
    assert [one.state for one in run_records(home)][1] == found


def test_a_run_whose_process_was_killed_has_crashed_and_files_of_other_versions_are_left_out(home, capsys, monkeypatch):
    record = noted(home, "Running", flow_run=FLOW)
    path = next(folder(home).glob("*.json"))
    table = json.loads(path.read_text())
    table["pid_started"] = 1  # another process had this number
    path.write_text(json.dumps(table))
    (folder(home) / "9.json").write_text('{"id": 1}')
    assert [(one.state, one.id) for one in run_records(home)] == [("Crashed", record.id)]
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    assert main(["runs"]) == 0
    began = f"{datetime.fromtimestamp(record.began, UTC):%H:%M},"
    assert capsys.readouterr().out.splitlines()[1].split() == [
        *("Crashed", "tiny", began, "0.0", "s"), "its", "process", "was", "killed", "rlhf", "resume", "0f9a8b7c",
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    monkeypatch.setattr(store_lists, "console", console)
    assert main(["runs"]) == 0
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["state", "run", "began", "(UTC)", "result"]
    assert lines[1].endswith("0.0 s its process...") and len(lines[1]) == 40
    assert lines[2] == "  next: rlhf resume 0f9a8b7c"
    assert main(["runs", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert (found["state"], found["next"], found["flow_run"]) == ("Crashed", "rlhf resume 0f9a8b7c", FLOW)


def test_a_disk_that_cannot_be_written_to_costs_a_line_and_not_the_run(home, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    note = RunNote(Home(tmp_path / "file"), noted(home, "Running"))
    note.change(state="Completed")
    assert "could not record the run" in caplog.text
