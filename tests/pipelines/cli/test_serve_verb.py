"""`rlhf down` while runs are in progress."""

import argparse
import io

import pytest

from pipelines.cli import serve_verb
from pipelines.services.home import Home
from pipelines.services.run_notes import new_note
from pipelines.services.running import Services
from rlhf_core.tracking import mlflow_client


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def two_runs(home: Home, monkeypatch: pytest.MonkeyPatch) -> list[Home]:
    """A run in a terminal and one of a deployment, which use the services; return the folders whose services stopped."""
    stopped: list[Home] = []
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    monkeypatch.setattr(serve_verb.servers, "stop_services", lambda home: bool(stopped.append(home) or stopped))
    Services(mlflow_client.owner_tags(), 4200, 5000, ready=True).write(home)
    for name, profile in (("tiny", "tiny/full"), ("nightly", "")):
        note = new_note(home, name, profile=profile, digest="d", overrides=[], until="", store=home.store)
        note.change(state="Running")
    return stopped


@pytest.mark.parametrize(("typed", "words", "stops"), [("n\n", False, False), ("", False, False), ("y\n", False, True)])
def test_down_lists_the_runs_in_progress_and_asks(two_runs, home, monkeypatch, capsys, typed, words, stops):
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    serve_verb.down(argparse.Namespace(yes=words))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "in progress: nightly, saves and stops; continue it with `rlhf resume`",
        "in progress: tiny, continues without the services",
    ]
    assert lines[2].startswith("stop the services? [y/N]") and two_runs == [home] * stops


@pytest.mark.parametrize(("stdin", "yes"), [(Terminal(""), True), (io.StringIO(""), False)])
def test_down_does_not_ask_with_yes_or_without_a_terminal(two_runs, home, monkeypatch, capsys, stdin, yes):
    monkeypatch.setattr("sys.stdin", stdin)
    serve_verb.down(argparse.Namespace(yes=yes))
    assert two_runs == [home] and "[y/N]" not in capsys.readouterr().out
