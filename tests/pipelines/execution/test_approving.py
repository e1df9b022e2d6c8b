"""Answers to what a gate has asked: which question is meant, and the commands that give them."""

import shlex
from unittest.mock import MagicMock

import pytest

from pipelines.cli.main import EXIT_BLOCKED, EXIT_OVER_BUDGET, EXIT_WAITING, main
from pipelines.execution.approving import Meant, answer_gate, choose_request
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run
from pipelines.execution.resume import Resumption
from pipelines.execution.run import run_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.prefect_flows import waiting
from pipelines.services.home import Home
from pipelines.services.waits import may_go_on
from rlhf_core.errors import ConfigError
from rlhf_core.stage.gate_decisions import Asker, GateAnswer, GateDecisions, GateRequest, Question
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageWaiting
from rlhf_core.store.disk import DiskStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PolicyRef
from tests.pipelines.execution.test_gates import APPROVE, Trial
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec


@pytest.fixture
def trial(tmp_path, home: Home, monkeypatch) -> Trial:
    """A run that waits at the gate `quality`."""
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    trial = Trial(tmp_path, home)
    with pytest.raises(StageWaiting):
        trial.run(APPROVE)
    return trial


def requests(home: Home) -> list[GateRequest]:
    from rlhf_core.store.artifacts import ArtifactStore

    return GateDecisions(ArtifactStore(home.store).shared).requests()


@pytest.mark.parametrize("named", ["mini", "f1", "profile"])
def test_a_run_is_named_by_its_profile_its_name_or_its_flow_run(trial, home, named, capsys):
    run = str(trial.folder / "mini.toml") if named == "profile" else named
    assert main(["approve", run, "quality", "--reason", "good enough"]) == 0
    said = capsys.readouterr().out
    (request,) = requests(home)
    assert f"gate quality, first {request.question.digest[:12]}: approved by " in said and ": good enough" in said
    assert "or with `rlhf resume f1`" in said
    (wait,) = DiskStore(home.store).tables("waits/")
    assert len(wait.value["keys"]) == 2, "the finished stages"
    assert len(trial.run(APPROVE)) == 4
    assert list(DiskStore(home.store).tables("waits/")) == []


def test_of_several_questions_the_right_one_must_be_named(trial, home):
    with pytest.raises(StageWaiting):
        trial.run(APPROVE, "seed=18")
    digests = {request.question.digest: request for request in requests(home)}
    first, second = digests.values()
    with pytest.raises(
        ConfigError,
        match=rf"gate = 'quality': has 2 questions: {second.id[:12]} \(open, total 1.5 < 2, first "
        rf"{second.question.digest[:12]}, waited for by mini 20\S+\); {first.id[:12]} \(open.*; add --question",
    ):
        answer_gate(Meant("mini", "quality"), "approve", reason="yes")
    for meant in (
        Meant("mini", "quality", artifact=second.question.digest[:12]),
        Meant("mini", "quality", question=second.id[:12]),
    ):
        assert answer_gate(meant, "approve", reason="yes")[0].id == second.id
    with pytest.raises(ConfigError, match="question = 'zz': the gate has no such question; its questions are"):
        answer_gate(Meant("mini", "quality", question="zz"), "approve", reason="yes")


def test_profiles_with_the_same_gate_and_artifact_have_questions_of_their_own(trial, home):
    """Both gates are called quality, after the same artifact in the same store, under the same condition."""
    with pytest.raises(StageWaiting):
        trial.run(APPROVE, "name=day")
    assert main(["approve", "mini", "quality", "--reason", "good enough"]) == 0  # the one that asked first
    assert len(trial.run(APPROVE)) == 4
    with pytest.raises(StageWaiting):
        trial.run(APPROVE, "name=day")
    assert main(["reject", "day", "quality", "--reason", "not for the day"]) == 0
    with pytest.raises(RunBlocked, match="not for the day"):
        trial.run(APPROVE, "name=day")
    assert len(trial.run(APPROVE)) == 4


def test_profiles_of_one_name_with_other_thresholds_are_told_apart(trial, home, tmp_path, capsys):
    """The same run name, gate, stage and artifact: only the condition and the file of the profile differ."""
    stricter = APPROVE.replace("2.0", "3.0")
    lenient = write_mini(tmp_path, APPROVE).rename(tmp_path / "lenient.toml")
    with pytest.raises(StageWaiting) as waits:
        trial.run(stricter)
    assert main(["approve", "mini", "quality", "--reason", "yes"]) == 2
    said = capsys.readouterr().err
    assert "total 1.5 < 2" in said and "total 1.5 < 3" in said and said.count("open") == 2
    assert main(["approve", str(lenient), "quality", "--reason", "yes"]) == 0  # its path says which
    assert len(trial.run(APPROVE)) == 4
    with pytest.raises(StageWaiting):
        trial.run(stricter)
    printed = str(waits.value).split("`")[1]  # the command as the run that waits has printed it
    assert main([*shlex.split(printed)[1:-1], "good enough"]) == 0
    assert len(trial.run(stricter)) == 4


def test_an_answer_that_might_be_about_a_settled_question_is_refused():
    said = GateAnswer(answer="approve", by="ada", at="now", reason="yes")

    def asked(digest: str, at: str, *answers: GateAnswer) -> GateRequest:
        question = Question(gate="quality", condition={"after": "sft"}, digest=digest, run="mini")
        return GateRequest(question, (Asker(run="mini", asked=f"2026-01-0{at}T00:00:00+00:00"),), answers)

    meant, settled = Meant("mini", "quality"), asked("d2", "2", said)
    assert choose_request([settled], meant, run="mini") == settled  # somebody thinks better of it
    newer = asked("d1", "3")
    assert choose_request([settled, newer], meant, run="mini") == newer
    older = asked("d1", "1")
    with pytest.raises(ConfigError, match=rf"has 2 questions: {older.id[:12]} \(open, .*answered: approved by ada"):
        choose_request([older, settled], meant, run="mini")
    assert choose_request([older, settled], Meant("mini", "quality", artifact="d2"), run="mini") == settled


def test_the_profile_that_asked_about_a_settled_question_does_not_hide_an_open_one():
    said = GateAnswer(answer="reject", by="ada", at="now", reason="no")

    def asked(digest: str, profile: str, *answers: GateAnswer) -> GateRequest:
        question = Question(gate="quality", condition={"after": "sft"}, digest=digest, run="mini")
        return GateRequest(question, (Asker(run="mini", profile=profile, asked="2026-01-01T00:00:00+00:00"),), answers)

    settled, other, meant = asked("d1", "p1", said), asked("d2", "p2"), Meant("mini", "quality")
    with pytest.raises(ConfigError, match=rf"has 2 questions: {other.id[:12]} \(open, .*{settled.id[:12]} \(answered"):
        choose_request([settled, other], meant, run="mini", profile="p1")
    assert choose_request([settled, other], meant, run="mini", profile="p2") == other
    settled_too = asked("d2", "p2", said)
    assert choose_request([settled, settled_too], meant, run="mini", profile="p1") == settled  # nothing is open


@pytest.mark.parametrize(("state", "resumed"), [("Waiting", True), ("Cancelled", False), ("Blocked", False)])
def test_the_form_starts_only_a_run_that_waits(monkeypatch, state, resumed):
    client = MagicMock()
    client.__enter__.return_value.read_flow_run.return_value.state.name = state
    monkeypatch.setattr(waiting, "get_client", lambda **_: client)
    monkeypatch.setattr(waiting, "resume_flow_run", lambda run, *, served: Resumption("scheduled", "it goes on"))
    said = waiting.resume_waiting_runs(["7d0cba3e-3c5b-4d37-94a0-9b7c5fa8b0a4"])
    assert (said == "it goes on") is resumed
    assert waiting.resume_waiting_runs(["f1"]).startswith("run the same command again")
    twice = ["7d0cba3e-3c5b-4d37-94a0-9b7c5fa8b0a4", "7d0cba3e-3c5b-4d37-94a0-9b7c5fa8b0a5"] * 2
    assert (waiting.resume_waiting_runs(twice) == "it goes on; it goes on") is resumed  # each run that asked, once


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mini", "qualty", "--reason", "x"], "no gate of this name waits in 'mini'; name one that has (run and gate): mini quality"),
        (["night", "quality", "--reason", "x"], "no gate of this name waits in 'night'"),
        (["mini", "quality", "--reason", " "], "reason = ' ': is empty; give a reason"),
        (["mini", "quality", "--reason", "x", "--artifact", "zz"], "artifact = 'zz': no question of the gate is about it"),
    ],
)  # fmt: skip
def test_an_answer_to_nothing_is_refused(trial, home, capsys, arguments, said):
    assert main(["approve", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert requests(home)[0].answers == ()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (
            StageWaiting("WAITING at gate q"),
            EXIT_WAITING,
            "WAITING at gate q; run the same command again to continue\n",
        ),
        (RunBlocked("BLOCKED by gate q"), EXIT_BLOCKED, "BLOCKED by gate q\n"),
        (RunOverBudget("budget.hours = 1"), EXIT_OVER_BUDGET, "budget.hours = 1\n"),
    ],
)
def test_each_end_of_a_run_has_an_exit_status_of_its_own(monkeypatch, capsys, error, status, said):
    def ends(options: object) -> None:
        raise error

    monkeypatch.setattr("pipelines.cli.run_command.run", ends)
    assert main(["run", "tiny/full"]) == status
    assert capsys.readouterr().err == said


def test_a_stage_that_pauses_asks_with_the_same_commands_and_goes_on_from_its_checkpoint(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(home.root))
    config, notes = load_profile(write_mini(tmp_path)), Notes()

    def pipeline(config: PipelineConfig, stages: Stages) -> None:
        stages.run_stage(toy_spec(ToyConfig(trouble="ask"), label="toy"), PolicyRef)

    def run_once() -> list[tuple[object, ...]]:
        notes.events.clear()
        with open_run(config, pipeline, RunOptions(), home=home, tracker=MemoryTracker(), listener=notes) as run:
            run_stages(run, pipeline, run.directly, tags={"prefect.flow_run_id": "f1"})
        return notes.of("started")

    with pytest.raises(
        StageWaiting, match=r"^toy is waiting: too fast: slow down: `rlhf approve mini pace --question \w{12} --r"
    ) as waits:
        run_once()
    assert not may_go_on(waits.value.condition, uri="")
    assert main(["approve", "mini", "pace", "--reason", "it may"]) == 0
    assert may_go_on(waits.value.condition, uri="")
    assert run_once() == [("toy", "RESUME")]
