"""Answers to what a gate has asked: which question is meant, and the commands that give them."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from pipelines.cli.main import EXIT_BLOCKED, EXIT_OVER_BUDGET, EXIT_WAITING, main
from pipelines.execution.approving import answer_gate, chosen
from pipelines.execution.resume import Resumption
from pipelines.prefect_flows import approval_flow
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageWaiting
from rlhf_core.store.gate_decisions import GateDecisions, GateRequest
from tests.pipelines.execution.test_gates import APPROVE, Trial


@pytest.fixture
def trial(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A run that waits at the gate `quality`."""
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    trial = Trial(tmp_path, home)
    with pytest.raises(StageWaiting):
        trial.run(APPROVE)
    return trial


def requests(home: Home) -> list[GateRequest]:
    from rlhf_core.store.artifacts import ArtifactStore

    return GateDecisions(ArtifactStore(home.store).layout).requests()


@pytest.mark.parametrize("named", ["mini", "f1", "profile"])
def test_a_run_is_named_by_its_profile_its_name_or_its_flow_run(
    trial: Trial, home: Home, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trial.folder / "mini.toml") if named == "profile" else named
    assert main(["approve", run, "quality", "--reason", "good enough"]) == 0
    said = capsys.readouterr().out
    (request,) = requests(home)
    assert f"gate quality, first {request.digest[:12]}: approved by " in said and ": good enough" in said
    assert "or with `rlhf resume f1`" in said
    assert len(trial.run(APPROVE)) == 4


def test_a_rejection_ends_the_next_run_as_blocked(trial: Trial) -> None:
    assert main(["reject", "mini", "quality", "--reason", "too short"]) == 0
    with pytest.raises(RunBlocked, match=r"rejected by .*: too short"):
        trial.run(APPROVE)


def test_of_several_artifacts_the_right_one_must_be_named(trial: Trial, home: Home) -> None:
    with pytest.raises(StageWaiting):
        trial.run(APPROVE, "seed=18")
    first, second = (request.digest for request in requests(home))
    with pytest.raises(
        ConfigError, match=rf"gate = 'quality': has asked about 2 artifacts: {first[:12]} .*; add --artifact"
    ):
        answer_gate("mini", "quality", "approve", reason="yes")
    request, _ = answer_gate("mini", "quality", "approve", reason="yes", artifact=second[:12])
    assert request.digest == second


def test_a_second_answer_is_about_what_was_asked_last() -> None:
    answer = {"answer": "approve", "by": "ada", "at": "now", "reason": "yes"}
    old = GateRequest(
        id="1", gate="quality", condition={}, digest="d1", found="", run="mini", asked="2026-01-01T00:00:00+00:00"
    )
    new = old.model_copy(update={"id": "2", "digest": "d2", "asked": "2026-01-02T00:00:00+00:00", "answers": [answer]})
    assert chosen([old, new], "mini", "quality", "") == new
    assert chosen([old, new], "mini", "quality", "d1") == old
    asked_again = old.model_copy(update={"asked": "2026-01-03T00:00:00+00:00"})
    assert chosen([asked_again, new], "mini", "quality", "") == asked_again


@pytest.mark.parametrize(("state", "resumed"), [("Waiting", True), ("Cancelled", False), ("Blocked", False)])
def test_the_form_starts_only_a_run_that_waits(monkeypatch: pytest.MonkeyPatch, state: str, resumed: bool) -> None:
    client = MagicMock()
    client.__enter__.return_value.read_flow_run.return_value.state.name = state
    monkeypatch.setattr(approval_flow, "get_client", lambda **_: client)
    monkeypatch.setattr(approval_flow, "resume", lambda run, *, served: Resumption("scheduled", "it goes on"))
    said = approval_flow.go_on("7d0cba3e-3c5b-4d37-94a0-9b7c5fa8b0a4")
    assert (said == "it goes on") is resumed
    assert approval_flow.go_on("f1").startswith("run the same command again")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mini", "qualty", "--reason", "x"], "no gate of this name has asked in 'mini'; name one that has (run and gate): mini quality"),
        (["night", "quality", "--reason", "x"], "no gate of this name has asked in 'night'"),
        (["mini", "quality", "--reason", " "], "reason = ' ': is empty; say why"),
        (["mini", "quality", "--reason", "x", "--artifact", "zz"], "artifact = 'zz': the gate has not asked about it"),
    ],
)  # fmt: skip
def test_an_answer_to_nothing_is_refused(
    trial: Trial, home: Home, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["approve", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert requests(home)[0].answers == []


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (StageWaiting("WAITING at gate q"), EXIT_WAITING, "WAITING at gate q; then the same command goes on\n"),
        (RunBlocked("BLOCKED by gate q"), EXIT_BLOCKED, "BLOCKED by gate q\n"),
        (RunOverBudget("budget.hours = 1"), EXIT_OVER_BUDGET, "budget.hours = 1\n"),
    ],
)
def test_each_end_of_a_run_has_an_exit_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str
) -> None:
    def ends(options: object) -> None:
        raise error

    monkeypatch.setattr("pipelines.cli.run_command.run", ends)
    assert main(["run", "tiny/full"]) == status
    assert capsys.readouterr().err == said
