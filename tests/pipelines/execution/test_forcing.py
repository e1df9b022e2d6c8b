"""A stage that is forced is forced once, however often its run waits before it ends."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.execution import run as forcing
from pipelines.execution.executor import RunOptions
from pipelines.execution.opening import open_run, plan_run, store_of
from pipelines.execution.run import run_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from rlhf_core.stage.gate_decisions import GateDecisions
from rlhf_core.stage.stopping import RunBlocked, RunOverBudget, StageWaiting
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PolicyRef
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec

APPROVE = '[[gates]]\nafter = "second"\notherwise = "approve"\nname = "quality"\n'


class Runs:
    """Runs of one profile with the same options: first -> second -> third, where the second may have trouble."""

    def __init__(self, folder: Path, home: Home, *force: str) -> None:
        self.folder, self.home, self.options = folder, home, RunOptions(force=force)

    def pipeline(self, trouble: str, at: str = "second") -> object:
        def pipeline(config: PipelineConfig, stages: Stages) -> None:
            ref = stages.run_stage(toy_spec(ToyConfig(), label="first", seed=config.seed), PolicyRef)
            for label, rate in (("second", 0.1), ("third", 0.2)):
                toy = ToyConfig(kl_coef=rate, trouble=trouble if label == at else "")
                ref = stages.run_stage(toy_spec(toy, label=label, inputs={"policy": ref}), PolicyRef)

        return pipeline

    def config(self, rules: str, *overrides: str) -> PipelineConfig:
        return load_profile(write_mini(self.folder, rules), overrides)

    @property
    def store(self) -> ArtifactStore:
        return store_of(self.config(""), self.home)

    def run(
        self, rules: str = "", *overrides: str, trouble: str = "", at: str = "second", force: bool = True
    ) -> Mapping[str, str]:
        """Run, and return what was done with each stage; the wait that it ends with is kept as `ended`."""
        self.notes, self.ended = Notes(), None
        config, pipeline = self.config(rules, *overrides), self.pipeline(trouble, at)
        options = self.options if force else RunOptions()
        with open_run(config, pipeline, options, home=self.home, tracker=MemoryTracker(), listener=self.notes) as run:
            try:
                run_stages(run, pipeline, run.directly, tags={})
            except (StageWaiting, RunOverBudget) as error:
                self.ended = error
        return dict(self.notes.of("started"))

    ended: BaseException | None = None
    notes: Notes


def test_a_forced_stage_is_not_forced_again_after_an_approval(tmp_path, home, caplog):
    caplog.set_level("INFO", forcing.__name__)
    runs = Runs(tmp_path, home, "first")
    runs.run()
    assert runs.run(APPROVE) == {"first": "RUN", "second": "HIT"}  # forced, and waits
    assert isinstance(runs.ended, StageWaiting)
    assert not [one for one in caplog.messages if "not forced again" in one]
    planned = plan_run(runs.config(APPROVE), runs.pipeline(""), runs.options, store=runs.store)
    assert planned[0].decision.action == "HIT"
    assert runs.run(APPROVE) == {"first": "HIT", "second": "HIT"}  # nobody has decided yet
    said = [one for one in caplog.messages if "not forced again" in one]
    assert said == ["first: forced before it waited; not forced again"]
    decisions = GateDecisions(runs.store.shared)
    decisions.decide(decisions.requests()[0], "approve", reason="fine")
    assert runs.run(APPROVE) == {"first": "HIT", "second": "HIT", "third": "HIT"}
    assert runs.run(APPROVE)["first"] == "RUN"  # the run that waited has ended: this is another one


def test_a_run_of_the_same_profile_without_the_option_ends_the_memory_of_it(tmp_path, home):
    runs = Runs(tmp_path, home, "first")
    runs.run(APPROVE)
    runs.run(APPROVE, force=False)
    assert runs.run(APPROVE)["first"] == "RUN"


def test_a_failure_after_the_wait_forces_nothing_again(tmp_path, home):
    runs = Runs(tmp_path, home, "first")
    runs.run(APPROVE)
    with pytest.raises(ValueError, match="step 2 went wrong"):
        runs.run(trouble="raise:2", at="third")
    assert runs.run(APPROVE)["first"] == "HIT"
    decisions = GateDecisions(runs.store.shared)
    decisions.decide(decisions.requests()[0], "reject", reason="no")
    with pytest.raises(RunBlocked):
        runs.run(APPROVE)
    with pytest.raises(RunBlocked):
        runs.run(APPROVE)  # a run that is blocked has ended: it is another one, and forces
    assert runs.notes.of("started")[0] == ("first", "RUN")


def test_another_profile_forces_for_itself(tmp_path, home):
    runs = Runs(tmp_path, home, "first")
    runs.run(APPROVE)
    assert runs.run(APPROVE, "name=other")["first"] == "RUN"


def test_a_forced_stage_that_waits_itself_goes_on_from_its_work_and_replaces_the_result(tmp_path, home):
    runs, people = Runs(tmp_path, home, "second"), tmp_path / "done"
    runs.run()
    before = runs.store.record(_key(runs))
    assert runs.run(trouble=f"people:{people}") == {"first": "HIT", "second": "RUN"}
    people.touch()
    assert runs.run(trouble=f"people:{people}") == {"first": "HIT", "second": "RESUME", "third": "HIT"}
    after = runs.store.record(_key(runs))
    assert before is not None and after is not None and after.handle == before.handle
    assert (after.attempts, after.resumed_from) == (before.attempts + 2, 2)


def test_a_forced_stage_goes_on_with_a_higher_budget(tmp_path, home):
    runs, short = Runs(tmp_path, home, "second"), "budget.hours=0.0003"
    runs.run()
    # It waits, after its first checkpoint, for a file that nobody writes: only the deadline of the budget ends it.
    assert runs.run("", short, trouble=f"wait:{tmp_path}/never") == {"first": "HIT", "second": "RUN"}
    assert isinstance(runs.ended, RunOverBudget)
    assert runs.run("", "budget.hours=1") == {"first": "HIT", "second": "RESUME", "third": "HIT"}


def test_a_wait_that_was_not_forced_is_started_over_by_force(tmp_path, home):
    runs, trouble = Runs(tmp_path, home, "second"), f"people:{tmp_path}/never"
    runs.run(trouble=trouble, force=False)
    assert runs.run()["second"] == "RUN"


def _key(runs: Runs) -> str:
    found = plan_run(runs.config(""), runs.pipeline(""), RunOptions(), store=runs.store)
    return next(stage.decision.key for stage in found if stage.label == "second")


@pytest.fixture(autouse=True)
def _no_state_of_ours(home: Home, monkeypatch) -> None:
    monkeypatch.setenv("RLHF_HOME", str(home.root))
