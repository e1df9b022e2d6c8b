import json
import multiprocessing
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipelines.execution.executor import Progress, RunContext, RunOptions, StageOutcome
from pipelines.execution.opening import open_run, store_of
from pipelines.execution.plan import Pipeline, PlannedStage, plan_stages
from pipelines.execution.run import PipelineRun, run_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.graph import Stages
from pipelines.flows.profile import PipelineConfig, load_profile
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import StageSpec
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import living_owner
from rlhf_core.tracking.memory import MemoryStageTracker, MemoryTracker
from rlhf_core.types import ArtifactRef, PolicyRef
from tests.support.listener import Notes
from tests.support.small_pipeline import two_toys, write_mini
from tests.support.toy_stage import NoEngines, ToyConfig, stage_key, toy_spec

FORK = multiprocessing.get_context("fork")


def run_once(
    tmp_path: Path, home: Home, pipeline: Pipeline = two_toys, options: RunOptions = RunOptions()
) -> tuple[dict[str, ArtifactRef], Notes, MemoryTracker]:
    notes, tracker = Notes(), MemoryTracker()
    config = load_profile(write_mini(tmp_path))
    with open_run(config, pipeline, options, home=home, tracker=tracker, listener=notes) as run:
        results = run_stages(run, pipeline, run.directly, tags={"from": "test"})
    return results, notes, tracker


def test_the_second_run_is_all_hits_with_the_same_artifacts(tmp_path, home):
    first, notes, tracker = run_once(tmp_path, home)
    assert notes.of("started") == [("first", "RUN"), ("second", "RUN")]
    assert [stage.status for stage in tracker.stages.values()] == ["FINISHED", "FINISHED"]
    again, notes, tracker = run_once(tmp_path, home)
    assert again == first
    assert notes.of("planned") == notes.of("started") == [("first", "HIT"), ("second", "HIT")]
    assert tracker.stages == {} and tracker.status == "FINISHED"
    assert tracker.tags["stage.first"].endswith("(cached)")


class NoExecutor:
    """A `StageExecutor` that computes nothing and notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def prepare(self, planned: Sequence[PlannedStage]) -> None:
        return None

    def execute(self, spec: StageSpec, show_progress: Progress) -> StageOutcome:
        self.asked.append(spec.label)
        raise LookupError(spec.label)

    def close(self) -> None:
        return None


def test_the_executor_gets_the_stages_that_are_not_in_the_store_or_are_forced(tmp_path, home):
    made, _, _ = run_once(tmp_path, home)
    config, executor = load_profile(write_mini(tmp_path)), NoExecutor()
    context = RunContext(config, RunOptions(), store_of(config, home), MemoryTracker(), Notes())
    run = PipelineRun(context, executor)
    assert run_stages(run, two_toys, run.directly, tags={}) == made and executor.asked == []
    slots: list[str] = []

    @contextmanager
    def slot(stage: str) -> Iterator[None]:
        slots.append(stage)
        yield

    run = PipelineRun(replace(context, options=RunOptions(force=("second",))), executor, slot=slot)
    with pytest.raises(LookupError):
        run_stages(run, two_toys, run.directly, tags={})
    assert executor.asked == ["second"] and slots == ["toy"], "only what is computed waits for a slot"


def test_a_limit_of_a_stage_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"deployments.limits.pppo: is no stage; .*ppo"):
        load_profile(write_mini(tmp_path, "[deployments]\nlimits = {pppo = 1}\n"))


def own_data(folder: Path, *uses: str) -> list[str]:
    """Return overrides with a source of 20 short and one of 20 long questions, used as `uses` says."""
    sources = []
    for name, words, use in zip(("short", "long"), (1, 200), uses, strict=True):
        rows = [{"prompt": f"{'why ' * words}{n}?", "completion": f"So {n}."} for n in range(20)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append(f'{{name = "{name}", path = "{folder / name}.jsonl", use = {{{use}}}}}')
    return [f'prepare_data.data={{type = "files", sources = [{", ".join(sources)}]}}']


def test_a_table_that_no_source_fills_is_missed_at_the_plan(tmp_path):
    own = own_data(tmp_path, "demonstrations = 1.0", "eval_prompts = 1.0")
    config, store = load_profile(write_mini(tmp_path), own), ArtifactStore(tmp_path / "store")
    with pytest.raises(
        ConfigError, match=r"prepare_data\.prompts: has no rows, and a later stage reads them; give prompts"
    ):
        plan_stages(config, store)
    assert [stage.label for stage in plan_stages(config, store, until="sft")] == ["prepare_data", "sft"]


def test_a_table_that_lost_all_rows_ends_the_run_before_the_next_stage(tmp_path, home, caplog):
    own = own_data(tmp_path, "demonstrations = 1.0", "prompts = 0.5, eval_prompts = 0.5")
    config, notes = load_profile(write_mini(tmp_path), own), Notes()
    with (
        open_run(config, lifecycle, RunOptions(), home=home, tracker=MemoryTracker(), listener=notes) as run,
        pytest.raises(ConfigError, match=r"prepare_data\.prompts: has no rows"),
    ):
        run_stages(run, lifecycle, run.directly, tags={})
    assert notes.of("started") == [("prepare_data", "RUN")]
    folder = store_of(config, home).path(run.results["prepare_data"])
    (summary,) = (
        one for one in caplog.records if one.name == "stages.prepare_data.run" and "dropped" in one.getMessage()
    )
    assert summary.levelname == "WARNING"
    first, reason, *lost, tables, preview, report = summary.getMessage().split("\n  ")
    assert first == "prepare_data: 20 of 40 rows are dropped (50%)"
    assert re.fullmatch(
        r"20 prompt too long \(first: \d+ tokens, at most 128\), at long.jsonl:1, long.jsonl:2, long.jsonl:3, \.\.\.",
        reason,
    )
    why = "of the 20 rows in long: most are dropped as prompt too long"
    assert lost == [f"no row is left for {table} {why}" for table in ("prompts", "eval_prompts")]
    assert tables == "tables: demonstrations 20"
    assert preview.endswith(f"{folder / 'preview.md'}") and report.endswith(f"{folder / 'validation.json'}")


def test_the_tracker_is_told_of_the_model_that_a_stage_made(tmp_path, home):
    results, _, tracker = run_once(tmp_path, home)
    made = [stage.models for stage in tracker.stages.values()]
    assert made == [[(label, ref.digest, ref.uri)] for label, ref in results.items()]


def test_an_unreachable_ray_is_noticed_before_the_first_stage(tmp_path, home, monkeypatch):
    def pipeline(config: PipelineConfig, stages: Stages) -> None:
        for label, engines in (("first", {}), ("second", {"trainer": {}})):
            stages.run_stage(toy_spec(ToyConfig(), label=label, engines=engines), PolicyRef)

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    config = load_profile(write_mini(tmp_path), ["runtime.type=ray"])
    notes = Notes()
    with (
        pytest.raises(ConfigError, match="no Ray head answers; start one with"),
        open_run(config, pipeline, RunOptions(), home=home, tracker=MemoryTracker(), listener=notes),
    ):
        pass
    assert notes.of("started") == [] and store_of(config, home).records() == []


def test_a_stage_that_is_forced_gets_a_tracking_run_of_its_own(tmp_path, home):
    class Opened(MemoryTracker):
        fresh: list[tuple[str, bool]] = []

        def stage(self, label: str, **rest: Any) -> MemoryStageTracker:
            self.fresh.append((label, rest["fresh"]))
            return super().stage(label, **rest)

    for force in ((), ("second",)):
        config, tracker = load_profile(write_mini(tmp_path)), Opened()
        with open_run(config, two_toys, RunOptions(force=force), home=home, tracker=tracker, listener=Notes()) as run:
            run_stages(run, two_toys, run.directly, tags={})
    assert Opened.fresh == [("first", False), ("second", False), ("second", True)]


def test_who_attaches_opens_no_tracking_run_and_takes_the_result(tmp_path, home):
    config, notes, tracker = load_profile(write_mini(tmp_path)), Notes(), MemoryTracker()
    store = store_of(config, home)
    spec = toy_spec(ToyConfig(), label="shared")
    other = FORK.Process(target=_hold_then_make, args=(store.root, spec))
    other.start()
    while living_owner(store.shared, stage_key(spec)) is None:
        time.sleep(0.02)
    pipeline: Pipeline = lambda config, stages: stages.run_stage(spec, PolicyRef)  # noqa: E731
    with open_run(config, pipeline, RunOptions(), home=home, tracker=tracker, listener=notes) as run:
        outcome = run.stage(spec, lambda *_: None)
    other.join()
    assert [action for _, action in notes.of("started")] == ["ATTACH", "HIT"]
    assert outcome.decision.action == "HIT" and tracker.stages == {}


def _hold_then_make(root: Path, spec: StageSpec) -> None:
    config = ToyConfig(seconds_a_step=0.3)  # operational: the same key
    execute(
        ArtifactStore(root),
        replace(spec, config=config),
        runtime=NoEngines(),
        tracker=MemoryStageTracker(),
        progress=lambda *_: None,
    )


def test_the_listener_hears_progress_metrics_and_the_final_numbers(tmp_path, home):
    _, notes, _ = run_once(tmp_path, home)
    assert notes.of("progress")[:3] == [("first", 1, 3), ("first", 2, 3), ("first", 3, 3)]
    assert notes.of("metrics")[:3] == [("first", 1), ("first", 2), ("first", 3)]
    assert notes.of("finished")[0] == ("first", "RUN", {"total": 1.5})


def failing(config: PipelineConfig, stages: Stages) -> None:
    stages.run_stage(toy_spec(ToyConfig(trouble="raise:2"), label="broken"), PolicyRef)


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_the_tracker_gets_the_true_status(tmp_path, home, error, status):
    notes, tracker = Notes(), MemoryTracker()

    def interrupted(done: int, total: int, message: str) -> None:
        raise error

    with (
        pytest.raises(error),
        open_run(
            load_profile(write_mini(tmp_path)), two_toys, RunOptions(), home=home, tracker=tracker, listener=notes
        ) as run,
    ):
        run_stages(run, two_toys, lambda spec, kind: run.stage(spec, interrupted).ref, tags={})
    assert [stage.status for stage in tracker.stages.values()] == [status]
    assert tracker.status == status
    assert notes.of("failed") == [("first", error.__name__)]
