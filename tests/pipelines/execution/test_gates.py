"""Gates of a run of toy stages: what is held back, what goes on, who is asked."""

import dataclasses
from pathlib import Path

import pytest

from pipelines.execution.executor import RunOptions
from pipelines.execution.gates import judge_metric
from pipelines.execution.opening import open_run, results_if_all_cached, store_of
from pipelines.execution.plan import PlannedStage, plan_stages
from pipelines.execution.run import run_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.flows.run_rules import GateConfig
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.stage.gate_decisions import GateDecisions
from rlhf_core.stage.key import Strictness
from rlhf_core.stage.stopping import RunBlocked, StageWaiting
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PolicyRef, ReportRef, RewardModelRef
from stages.compare_reward_models import CompareRewardModelsConfig
from stages.table import STAGES
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec

BLOCK = '[[gates]]\nafter = "first"\nmetric = "total"\nop = ">="\nvalue = 2.0\n'
"""Toy stages have the metric total = 1.5."""
APPROVE = BLOCK + 'otherwise = "approve"\nname = "quality"\n'


def three_toys(config: PipelineConfig, stages: Stages) -> None:
    """first -> second -> third, and one alone, last."""
    first = stages.run_stage(toy_spec(ToyConfig(), label="first", seed=config.seed), PolicyRef)
    rates = {"second": 0.1, "third": 0.2}
    for label, rate in rates.items():
        first = stages.run_stage(toy_spec(ToyConfig(kl_coef=rate), label=label, inputs={"policy": first}), PolicyRef)
    stages.run_stage(toy_spec(ToyConfig(kl_coef=0.3), label="alone"), PolicyRef)


class Trial:
    """Runs of one profile, each with its own listener and tracker."""

    def __init__(self, folder: Path, home: Home) -> None:
        self.folder, self.home = folder, home
        self.notes, self.tracker = Notes(), MemoryTracker()

    def config(self, rules: str, *overrides: str) -> PipelineConfig:
        return load_profile(write_mini(self.folder, rules), overrides)

    def run(self, rules: str, *overrides: str, options: RunOptions = RunOptions()) -> dict[str, object]:
        self.notes, self.tracker = Notes(), MemoryTracker()
        config = self.config(rules, *overrides)
        with open_run(config, three_toys, options, home=self.home, tracker=self.tracker, listener=self.notes) as run:
            return dict(run_stages(run, three_toys, run.directly, tags={"prefect.flow_run_id": "f1"}))

    def plan(self, rules: str, *overrides: str, until: str = "") -> dict[str, PlannedStage]:
        config = self.config(rules, *overrides)
        planned = plan_stages(config, store_of(config, self.home), pipeline=three_toys, until=until)
        return {stage.label: stage for stage in planned}

    @property
    def ran(self) -> list[object]:
        return [label for label, _ in self.notes.of("started")]


@pytest.fixture
def trial(tmp_path, home: Home) -> Trial:
    return Trial(tmp_path, home)


def test_a_gate_that_does_not_hold_ends_the_branch_and_nothing_else(trial):
    with pytest.raises(RunBlocked, match=r"^BLOCKED by gate first: total 1.5 < 2 \(not run: second, third\)$"):
        trial.run(BLOCK)
    assert trial.ran == ["first", "alone"]
    assert trial.notes.of("failed") == [("second", "StageHeld"), ("third", "StageHeld")]
    assert trial.tracker.tags["gate.first"] == "blocked: total 1.5 < 2"
    assert (trial.tracker.tags["state"], trial.tracker.status) == ("Blocked", "FAILED")


def test_a_gate_that_holds_changes_nothing_but_a_tag(trial):
    made = trial.run(BLOCK.replace("2.0", "1.5"))
    assert list(made) == ["first", "second", "third", "alone"]
    assert trial.tracker.tags["gate.first"] == "passed: total 1.5 >= 1.5"
    assert trial.tracker.status == "FINISHED"


def test_gates_are_in_no_key_and_are_judged_of_hits(trial):
    made = trial.run("")
    with pytest.raises(RunBlocked):
        trial.run(BLOCK)
    assert [action for _, action in trial.notes.of("started")] == ["HIT", "HIT"]
    assert trial.run(BLOCK.replace("2.0", "1.0")) == made
    assert {action for _, action in trial.notes.of("started")} == {"HIT"}


def test_the_plan_shows_what_a_gate_holds_back(trial):
    assert {stage.decision.action for stage in trial.plan(BLOCK).values()} == {"RUN"}
    trial.run("")
    planned = trial.plan(BLOCK)
    assert {label: stage.decision.action for label, stage in planned.items()} == {
        "first": "HIT", "second": "BLOCKED", "third": "BLOCKED", "alone": "HIT",
    }  # fmt: skip
    assert planned["third"].decision.reason == "BLOCKED by gate first: total 1.5 < 2"


def test_a_run_of_hits_with_a_gate_after_its_last_stage_is_not_taken_as_finished(trial):
    trial.run("")
    for value, taken in (("2.0", False), ("1.0", True)):
        rules = BLOCK.replace("first", "alone").replace("2.0", value)
        config = trial.config(rules)
        store = store_of(config, trial.home)
        planned = plan_stages(config, store, pipeline=three_toys)
        assert {stage.decision.action for stage in planned} == {"HIT"}
        found = results_if_all_cached(planned, store, Notes(), strict=Strictness())
        assert (found is not None) is taken


def test_a_warning_is_a_tag_and_holds_nothing_back(trial):
    assert len(trial.run(BLOCK + 'otherwise = "warn"\n')) == 4
    assert trial.tracker.tags["gate.first"] == "warned: total 1.5 < 2"


def test_a_gate_is_judged_though_its_stage_is_the_last_that_is_wanted(trial):
    with pytest.raises(RunBlocked, match=r"total 1.5 < 2$"):
        trial.run(BLOCK, options=RunOptions(until="first"))
    assert trial.ran == ["first"]


def test_a_run_that_waits_asks_and_goes_on_when_approved(trial):
    with pytest.raises(
        StageWaiting, match=r"WAITING at gate quality: total 1.5 < 2 \(first\): `rlhf approve mini quality"
    ):
        trial.run(APPROVE)
    assert trial.ran == ["first", "alone"] and trial.tracker.tags["state"] == "Waiting"
    decisions = GateDecisions(store_of(trial.config(APPROVE), trial.home).shared)
    (request,) = decisions.requests()
    (asker,) = request.askers
    assert (asker.run, request.question.gate, asker.links) == ("mini", "quality", {"prefect.flow_run_id": "f1"})
    decisions.decide(request, "approve", reason="good enough", by="ada")
    assert list(trial.run(APPROVE)) == ["first", "second", "third", "alone"]
    said = trial.tracker.tags["gate.quality"]
    assert said.startswith("approved: total 1.5 < 2; approved by ada at ") and said.endswith(": good enough")


def test_the_printed_command_can_be_pasted(trial, monkeypatch):
    rules = APPROVE.replace('"quality"', '"good enough?"')
    with pytest.raises(
        StageWaiting, match=r"rlhf approve 'my run' 'good enough\?' --question \w{12} --store \S+/store --r"
    ):
        trial.run(rules, "name=my run")
    monkeypatch.setenv("RLHF_HOME", str(trial.home.root))
    with pytest.raises(StageWaiting, match=r"--question \w{12} --reason \.\.\.`"):
        trial.run(rules, "name=my run")


def test_a_rejection_blocks_and_the_last_answer_counts(trial):
    with pytest.raises(StageWaiting):
        trial.run(APPROVE)
    decisions = GateDecisions(store_of(trial.config(APPROVE), trial.home).shared)
    decisions.decide(decisions.requests()[0], "reject", reason="too short", by="ada")
    with pytest.raises(RunBlocked, match=r"BLOCKED by gate quality: total 1.5 < 2; rejected by ada at .*: too short"):
        trial.run(APPROVE)
    decisions.decide(decisions.requests()[0], "approve", reason="looked again", by="bob")
    assert len(trial.run(APPROVE)) == 4
    assert len(decisions.requests()[0].answers) == 2


def test_an_approval_is_of_one_artifact_under_one_condition(trial):
    with pytest.raises(StageWaiting):
        trial.run(APPROVE)
    decisions = GateDecisions(store_of(trial.config(APPROVE), trial.home).shared)
    decisions.decide(decisions.requests()[0], "approve", reason="yes", by="ada")
    with pytest.raises(StageWaiting):  # another artifact
        trial.run(APPROVE, "seed=18")
    with pytest.raises(StageWaiting):  # another condition
        trial.run(APPROVE.replace("2.0", "3.0"))
    assert len(trial.run(APPROVE)) == 4


def test_a_gate_without_a_condition_asks_of_every_artifact(trial):
    with pytest.raises(StageWaiting, match="gate first: a person has to approve it"):
        trial.run('[[gates]]\nafter = "first"\notherwise = "approve"\n')


def test_an_unknown_label_is_refused_before_anything_is_computed(trial):
    with pytest.raises(
        ConfigError, match=r"gates\[0\].after = 'frist': no such stage; this pipeline has first, .*; did"
    ):
        trial.run(BLOCK.replace("first", "frist"))
    assert trial.ran == []
    assert list(trial.plan(BLOCK.replace("first", "alone"), until="second")) == ["first", "second"]
    with pytest.raises(ConfigError, match="no such stage"):
        trial.plan(BLOCK.replace("first", "frist"), until="second")


@pytest.mark.parametrize(
    ("metric", "known", "said"),
    [
        (
            "accuracy_low",
            {"accuracy_low": 0.9, "prompts": 5.0},
            "accuracy_low 0.9 >= 0.5 of 5 prompts, where 6 are needed",
        ),
        ("held_out/accuracy", {"held_out/accuracy": 0.9, "held_out/prompts": 6.0, "prompts": 1.0}, ""),
        ("policies/ppo/gold/low", {"policies/ppo/gold/low": 2.0, "policies/ppo/gold/prompts": 1.0}, "of 1 prompts"),
        ("policies/ppo/gold/low", {"policies/ppo/gold/mean": 2.0, "policies/ppo/gold/prompts": 1.0}, "no interval"),
        ("policies/ppo/kl_per_token", {"policies/ppo/kl_per_token": 2.0, "policies/ppo/prompts": 3.0}, "of 3 prompts"),
        ("pass_at_1_low", {"pass_at_1_low": 0.7, "pass_at_1_prompts": 2.0, "prompts": 9.0}, "of 2 prompts"),
        (
            "math/ppo/gold_difference",
            {"math/ppo/gold_difference": 1.0, "math/ppo/gold_difference_prompts": 4.0},
            "of 4 ",
        ),
        ("prompts", {"prompts": 2.0}, ""),
        ("train/loss", {"train/loss": 2.0}, ""),
    ],
)
def test_a_number_of_few_prompts_passes_no_gate(metric, known, said):
    gate = GateConfig(after="first", metric=metric, op=">=", value=0.5)
    holds, why = judge_metric(gate, 0, known)
    assert holds is not bool(said) and said in why
    fewer = GateConfig(after="first", metric=metric, op=">=", value=0.5, least_prompts=1)
    assert judge_metric(fewer, 0, known)[0] is (metric in known)
    assert "least_prompts" not in gate.model_dump(mode="json")  # an approval that was given still holds


def test_an_unknown_metric_names_those_that_there_are(trial):
    with pytest.raises(
        ConfigError, match=r"gates\[0\].metric = 'totl': first has no such metric; it has total; did you mean total"
    ):
        trial.run(BLOCK.replace("total", "totl"))
    with pytest.raises(ConfigError, match="totl"):  # the stage is in the store now: before any compute
        trial.plan(BLOCK.replace("total", "totl"))


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (BLOCK + BLOCK, r"gates\[1\].name = 'first': is the name of two gates"),
        (BLOCK.replace("2.0", "nan"), r"gates.*value = nan: .*finite"),
        ('[[gates]]\nafter = "first"\n', "otherwise = 'block': the gate has no condition"),
        (
            '[[gates]]\nafter = "first"\nmetric = "total"\n',
            "metric = 'total': is compared with nothing; add op and value",
        ),
    ],
)
def test_a_gate_that_cannot_be_judged_is_refused(trial, rules, said):
    with pytest.raises(ConfigError, match=said):
        trial.config(rules)


def test_a_gate_after_a_report_holds_back_what_the_report_judges(store):
    from pipelines.execution.gates import artifacts_behind

    before, after = (RewardModelRef(uri=f"store://{name}", digest=name) for name in ("a" * 64, "b" * 64))
    inputs = {"reward_models": {"before": before, "after": after}}
    spec = STAGES["compare_reward_models"].spec(
        CompareRewardModelsConfig(), inputs, label="online/round_1/compare", seed=1, engines={}
    )
    report = ReportRef(uri="store://" + "c" * 64, digest="c" * 64)
    assert list(artifacts_behind(spec, report)) == [report, after]
    alone = dataclasses.replace(spec, inputs={"reward_models": {"reward_model": after}})
    assert list(artifacts_behind(alone, report)) == [report]
