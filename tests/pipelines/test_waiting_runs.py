"""Runs that are killed (SIGKILL) while they wait for people, and while a question or an answer is being written."""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.cli import run_command
from pipelines.cli.main import main
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run, store_of
from pipelines.execution.request import RunRequest
from pipelines.execution.run import run_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from pipelines.services.waits import may_go_on
from rlhf_core.annotation.proposing import Comparison, write_comparisons
from rlhf_core.config.annotators import FileAnnotator
from rlhf_core.stage.gate_decisions import GateDecisions, Question
from rlhf_core.stage.stopping import RunBlocked, StageWaiting
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import ComparisonsRef, Message, PolicyRef, PreferencesRef
from stages.collect_preferences import CollectPreferencesConfig
from stages.table import STAGES
from tests.support.forks import forked
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec

GATE = '[[gates]]\nafter = "second"\notherwise = "approve"\nname = "quality"\n'


def until(true: Callable[[], object], *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


class Waiting:
    """`rlhf run --force first --wait` of toy stages and a stage for annotators, without Prefect and MLflow."""

    def __init__(self, folder: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home, self.notes = folder, home, Notes()
        self.looked = folder / "looked"
        monkeypatch.setenv("RLHF_HOME", str(home.root))
        monkeypatch.setattr(run_command, "WAIT_LOOK_S", 0.02)
        monkeypatch.setattr(run_command, "run_request", self._run_request)

        def noted(condition: Any, *, uri: str) -> bool:
            met = may_go_on(condition, uri=uri)
            self.looked.touch()
            return met

        monkeypatch.setattr(run_command, "may_go_on", noted)
        prompt = (Message("user", "What is 2 + 2?"),)
        write_comparisons(folder / "asked", [Comparison("c1", prompt, "", "test", "4", "5", "sft", "sft")])

    def run(self, *, wait: bool) -> list[tuple[object, ...]]:
        """Run as the command does; return which stages were started, and how."""
        self.notes.events.clear()
        run_command.run(argparse.Namespace(**RunRequest("mini").parameters(), wait=wait))
        return self.notes.of("started")

    def waits(self) -> None:
        self.run(wait=True)

    def killed_while_it_waits(self) -> None:
        self.looked.unlink(missing_ok=True)
        process = forked(self.waits)
        process.start()
        assert process.pid is not None
        until(self.looked.exists)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL

    def judge(self) -> None:
        (own,) = (self.folder / "exchange").iterdir()
        (own / "judgments.jsonl").write_text(json.dumps({"id": "c1", "choice": "first"}) + "\n")

    @property
    def config(self) -> PipelineConfig:
        return load_profile(write_mini(self.folder, GATE))

    def _run_request(self, request: RunRequest) -> None:
        wanted = RunOptions(force=("first",))
        with open_run(
            self.config, self._pipeline, wanted, home=self.home, tracker=MemoryTracker(), listener=self.notes
        ) as run:
            run_stages(run, self._pipeline, run.directly, tags={})

    def _pipeline(self, config: PipelineConfig, stages: Stages) -> None:
        store = store_of(config, self.home)
        first = stages.run_stage(toy_spec(ToyConfig(), label="first"), PolicyRef)
        settings = CollectPreferencesConfig(
            annotator=FileAnnotator(folder=f"{self.folder}/exchange"), eval_fraction=0.0
        )
        inputs: dict[str, Any] = {"comparisons": store.external(ComparisonsRef, self.folder / "asked")}
        collect = STAGES["collect_preferences"].spec(settings, inputs, label="collect", seed=17, engines={})
        stages.run_stage(collect, PreferencesRef)
        for label, rate in (("second", 0.1), ("third", 0.2)):
            spec = toy_spec(ToyConfig(kl_coef=rate), label=label, inputs={"policy": first})
            first = stages.run_stage(spec, PolicyRef)


def test_a_run_that_is_killed_while_it_waits_loses_nothing(tmp_path, home, monkeypatch):
    waiting = Waiting(tmp_path, home, monkeypatch)
    waiting.killed_while_it_waits()  # for annotators
    with pytest.raises(StageWaiting, match="0 of 1 comparisons are judged"):
        waiting.run(wait=False)
    assert waiting.notes.of("started")[0] == ("first", "HIT")  # it was forced by the run that was killed
    waiting.judge()
    waiting.killed_while_it_waits()  # for an approval
    with pytest.raises(StageWaiting, match="WAITING at gate quality"):
        waiting.run(wait=False)
    assert waiting.notes.of("started") == [("first", "HIT"), ("collect", "HIT"), ("second", "HIT")]
    assert main(["approve", "mini", "quality", "--reason", "fine"]) == 0
    assert waiting.run(wait=False)[-1] == ("third", "RUN")


def test_a_run_that_stays_goes_on_when_it_is_answered(tmp_path, home, monkeypatch):
    waiting = Waiting(tmp_path, home, monkeypatch)
    process = forked(waiting.waits)
    process.start()
    until(waiting.looked.exists)
    waiting.judge()
    decisions = GateDecisions(store_of(waiting.config, home).shared)
    until(decisions.requests)
    decisions.decide(decisions.requests()[0], "approve", reason="fine")
    process.join(120)
    assert process.exitcode == 0
    with pytest.raises(RunBlocked, match="thought better of it"):
        main(["reject", "mini", "quality", "--reason", "thought better of it"])
        waiting.run(wait=False)


@pytest.mark.parametrize("after", range(20))
def test_an_answer_stands_wherever_a_later_question_or_answer_is_killed(store, after):
    decisions = GateDecisions(store.shared)
    question = Question(gate="quality", condition={"after": "sft"}, digest="d1", found="loss 2 >= 1", run="night")

    def asks_and_answers(killed_after: int) -> None:
        """Be killed after so many writes to the disk: of a file's content, its name, its folder."""
        left, sync = [killed_after], os.fsync

        def counted(descriptor: Any) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            sync(descriptor)

        os.fsync = counted
        request = decisions.ask(question, run="night", links={"flow": "f2"})
        decisions.decide(request, "reject", reason="no", by="bob")

    if after % 2:  # a question that was answered before; else the very first one
        decisions.decide(decisions.ask(question, run="night", links={}), "approve", reason="fine", by="ada")
    process = forked(lambda: asks_and_answers(after // 2))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    said = [one.by for request in decisions.requests() for one in request.answers]
    assert said in ([[], ["bob"]], [["ada"], ["ada", "bob"]])[after % 2]
    again = decisions.ask(question, run="night", links={"flow": "f2"})  # the same command
    assert [one.by for one in again.answers] == said
    decisions.decide(again, "approve", reason="fine", by="eve")
    found = decisions.find(question.id)
    assert found is not None and found.answer is not None and found.answer.by == "eve"
    assert len(found.askers) == 1 + after % 2
