"""Budgets of runs of toy stages, with a clock that the test moves."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.execution.budget import Budget, cpus_of, gpus_of
from pipelines.execution.executor import RunOptions, StageOutcome
from pipelines.execution.opening import open_run, store_of
from pipelines.execution.plan import plan_stages
from pipelines.execution.run import run_stages
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.flows.run_rules import BudgetConfig, PricesConfig
from pipelines.services.home import Home
from rlhf_core.config.runtime import RuntimeConfig, VllmSamplerConfig
from rlhf_core.errors import ConfigError
from rlhf_core.stage import stopping
from rlhf_core.stage.decision import Decision
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.stopping import RunOverBudget
from rlhf_core.store.disk import DiskStore
from rlhf_core.tracking.memory import MemoryTracker
from rlhf_core.types import PolicyRef
from tests.support.listener import Notes
from tests.support.small_pipeline import write_mini
from tests.support.toy_stage import ToyConfig, toy_spec

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def spend(budget: Budget, clock: Clock, seconds: float, gpus: float = 0.0, *, counts: bool = True) -> None:
    with budget.spending(gpus) as spent:
        clock.now += seconds
        spent.counts = counts


def test_hours_are_counted_over_attempts_until_the_run_finishes(tmp_path):
    clock, config = Clock(), BudgetConfig(hours=2)
    spend(Budget(config, "night", DiskStore(tmp_path), clock), clock, 1.5 * HOUR)
    again = Budget(config, "night", DiskStore(tmp_path), clock)  # another process goes on with the run
    spend(again, clock, 1.0 * HOUR)
    with pytest.raises(
        RunOverBudget, match=r"^budget.hours = 2: 2.5 hours are spent; finished work is kept: run the same"
    ):
        spend(again, clock, 0.0)
    spend(Budget(BudgetConfig(hours=3), "night", DiskStore(tmp_path), clock), clock, 0.1 * HOUR)
    Budget(config, "day", DiskStore(tmp_path), clock).check()  # another run has a budget of its own
    again.close()
    Budget(config, "night", DiskStore(tmp_path), clock).check()


def test_gpu_hours_count_gpus_and_work_of_others_costs_nothing(tmp_path):
    clock = Clock()
    budget = Budget(BudgetConfig(gpu_hours=8), "night", DiskStore(tmp_path), clock)
    spend(budget, clock, 50 * HOUR, gpus=0)
    spend(budget, clock, 3 * HOUR, gpus=4, counts=False)
    spend(budget, clock, 1 * HOUR, gpus=4)
    budget.check()
    spend(budget, clock, 1 * HOUR, gpus=4)
    with pytest.raises(RunOverBudget, match=r"budget.gpu_hours = 8: 8 GPU hours are spent"):
        budget.check()


def test_the_cost_adds_up_machines_and_gpus_at_the_present_prices(tmp_path):
    clock, prices = Clock(), PricesConfig(gpu=2.0, machine=0.5)
    budget = Budget(BudgetConfig(cost=20, prices=prices), "night", DiskStore(tmp_path), clock)
    spend(budget, clock, 2 * HOUR, gpus=4)  # 2 h x (0.5 + 4 x 2.0) = 17
    spend(budget, clock, 4 * HOUR)  # + 4 h x 0.5 = 19
    budget.check()
    spend(budget, clock, 2 * HOUR)  # + 2 h x 0.5 = 20
    with pytest.raises(RunOverBudget, match=r"^budget.cost = 20: 20 is what the hours so far have cost; finished work"):
        budget.check()
    Budget(BudgetConfig(cost=20.1, prices=prices), "night", DiskStore(tmp_path), clock).check()
    dearer = BudgetConfig(cost=20.1, prices=PricesConfig(gpu=2.5, machine=0.5))  # 8 h x 0.5 + 8 GPU hours x 2.5 = 24
    with pytest.raises(RunOverBudget, match=r"^budget.cost = 20.1: 24 is"):
        Budget(dearer, "night", DiskStore(tmp_path), clock).check()


def test_a_stage_is_stopped_when_its_gpus_have_cost_what_is_left(tmp_path):
    budget = Budget(BudgetConfig(cost=0.001, prices=PricesConfig(gpu=3.6)), "night", DiskStore(tmp_path))
    began = time.monotonic()
    with pytest.raises(RunOverBudget, match=r"^budget.cost = 0.001: 0.0\d+ is"), budget.spending(4):
        while not stopping.reason():  # 0.001 / (4 x 3.6 an hour) = 0.25 s
            assert time.monotonic() < began + 60
        raise stopping.StageStopped(stopping.reason())


def test_a_cost_without_prices_is_refused():
    with pytest.raises(ConfigError, match=r"budget.*cost = 5: nothing has a price; add prices, such as \{gpu = 2.5"):
        load_profile("tiny/full", ["budget.cost=5"])
    assert load_profile("tiny/full", ["budget.cost=5", "budget.prices.gpu=2"]).budget.prices.gpu == 2


def test_what_a_failed_stage_has_spent_counts(tmp_path):
    clock = Clock()
    budget = Budget(BudgetConfig(hours=1), "night", DiskStore(tmp_path), clock)
    with pytest.raises(ZeroDivisionError), budget.spending(0):
        clock.now += 2 * HOUR
        raise ZeroDivisionError
    with pytest.raises(RunOverBudget):
        budget.check()


def test_without_a_budget_nothing_is_written(tmp_path):
    clock = Clock()
    spend(Budget(BudgetConfig(), "night", DiskStore(tmp_path), clock), clock, HOUR)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_the_same_name_without_a_budget_leaves_what_was_spent(tmp_path):
    clock, config = Clock(), BudgetConfig(hours=1)
    spend(Budget(config, "tiny", DiskStore(tmp_path), clock), clock, 2 * HOUR)
    Budget(BudgetConfig(), "tiny", DiskStore(tmp_path), clock).close()
    with pytest.raises(RunOverBudget):
        Budget(config, "tiny", DiskStore(tmp_path), clock).check()


def toys(trouble: str) -> Any:
    def pipeline(config: PipelineConfig, stages: Stages) -> None:
        first = stages.run_stage(toy_spec(ToyConfig(), label="first"), PolicyRef)
        if trouble == "first":
            return
        slow = toy_spec(ToyConfig(kl_coef=0.1, trouble=trouble), label="second", inputs={"policy": first})
        stages.run_stage(slow, PolicyRef)

    return pipeline


def run_once(
    folder: Path, home: Home, trouble: str, *overrides: str, until: str = ""
) -> tuple[Notes, MemoryTracker, Any]:
    notes, tracker, pipeline = Notes(), MemoryTracker(), toys(trouble)
    ended: Any = None
    config = load_profile(write_mini(folder), overrides)
    with open_run(config, pipeline, RunOptions(until=until), home=home, tracker=tracker, listener=notes) as run:
        try:
            run_stages(run, pipeline, run.directly, tags={})
        except RunOverBudget as error:
            ended = error
    return notes, tracker, ended


def test_a_stage_is_asked_to_save_when_the_hours_are_spent_and_a_higher_budget_goes_on(tmp_path, home):
    run_once(tmp_path, home, "first")  # without a budget
    # The second stage waits for a file that nobody writes: only the deadline of the budget ends it.
    notes, tracker, ended = run_once(tmp_path, home, f"wait:{tmp_path}/never", f"budget.hours={1 / HOUR}")
    assert str(ended).startswith("budget.hours = ")
    assert (tracker.tags["state"], tracker.status) == ("OverBudget", "SCHEDULED")
    assert notes.of("failed") == [("second", "RunOverBudget")]

    run_once(tmp_path, home, "first", f"budget.hours={1 / HOUR}", until="first")  # a part of the run is not its end
    notes, _, ended = run_once(tmp_path, home, "", f"budget.hours={1 / HOUR}")
    assert ended is not None and notes.of("started") == [("first", "HIT")]  # spent before it could begin

    notes, tracker, ended = run_once(tmp_path, home, "", "budget.hours=1")
    assert ended is None and tracker.status == "FINISHED"
    assert notes.of("started") == [("first", "HIT"), ("second", "RESUME")]

    config = load_profile(write_mini(tmp_path))
    assert list(store_of(config, home).shared.tables("budgets/")) == []  # the next run starts anew
    assert stopping.reason() == ""


def test_pairs_beyond_the_budget_are_refused_by_the_plan(store):
    def planned(*overrides: str) -> int:
        return len(plan_stages(load_profile("tiny/online", overrides), store))

    # 300 pairs a round, a tenth of them again, and a twentieth as many attention checks: 345 in each of three rounds.
    with pytest.raises(
        ConfigError, match=r"budget.comparisons = 1000: online/round_1/propose 345 \+ .* may propose 1035 pairs"
    ):
        planned("budget.comparisons=1000")
    assert planned("budget.comparisons=1035") == planned()


def test_a_gpu_that_is_shared_counts_once():
    spec: Any = SimpleNamespace(engines={"trainer": {}, "sampler": {}})
    apart = RuntimeConfig(
        train_workers=4,
        gpus_per_train_worker=1,
        gpus_per_engine=2,
        sampler=VllmSamplerConfig(engines=2, tensor_parallel=2),
    )
    assert gpus_of(spec, apart) == 8
    shared = RuntimeConfig(
        train_workers=4, gpus_per_train_worker=0.5, gpus_per_engine=0.5, sampler=VllmSamplerConfig(engines=4)
    )
    assert gpus_of(spec, shared) == 4
    pair = {"sampler": shared.sampler.model_copy(update={"engines": 2, "tensor_parallel": 2})}
    assert gpus_of(spec, shared.model_copy(update=pair)) == 4
    only: Any = SimpleNamespace(engines={"trainer": {}})
    assert gpus_of(only, apart) == 4 and gpus_of(only, RuntimeConfig()) == 0
    assert (cpus_of(spec, apart), cpus_of(only, apart)) == (7, 5), "the driver's CPU is among them"


def test_what_another_process_has_computed_costs_nothing_while_we_wait_for_it(tmp_path, home):
    class Waits:
        """An executor that waits for another process, whose result is a hit then."""

        def execute(self, spec: StageSpec, show_progress: Any) -> StageOutcome:
            clock.now += 5 * HOUR
            return StageOutcome(
                PolicyRef(uri="store://x", digest="x"), Decision("HIT", "found", "k", None), {}, 0, [], ""
            )

    clock = Clock()
    pipeline = toys("first")
    config = load_profile(write_mini(tmp_path), ["budget.hours=1"])
    with open_run(config, pipeline, RunOptions(), home=home, tracker=MemoryTracker(), listener=Notes()) as run:
        run.executor = Waits()
        run.budget.clock = clock
        outcome = run.stage(toy_spec(ToyConfig(), label="first"), lambda *_: None)
        assert (outcome.ref.digest, clock.now) == ("x", 5 * HOUR)
        run.budget.check()  # raises RunOverBudget if the five hours were ours
