"""What a run is opened with, and a run of cached stages, which opens nothing."""

import os
from pathlib import Path

import pytest

from pipelines.execution.executor import RunContext, RunOptions
from pipelines.execution.local import LocalExecutor
from pipelines.execution.opening import is_watched, open_executor, plan_run, results_if_all_cached, store_of
from pipelines.execution.plan import PlannedStage, plan_stages
from pipelines.flows.full import lifecycle
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_contrib.ray_jobs.executor import RayJobExecutor
from rlhf_core.errors import ConfigError
from rlhf_core.stage.key import Strictness
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.leases import name_of
from rlhf_core.store.protocol import discard
from rlhf_core.tracking.memory import MemoryTracker
from tests.pipelines.execution.test_run import run_once
from tests.support.listener import Notes
from tests.support.small_pipeline import two_toys, write_mini


@pytest.mark.parametrize(
    ("execution", "kind"),
    [
        ("inline", LocalExecutor),
        ("ray-job", RayJobExecutor),
        ("rlhf_contrib.ray_jobs.executor:RayJobExecutor", RayJobExecutor),
    ],
)
def test_the_executor_is_the_one_that_the_runtime_names(tmp_path, home, execution, kind):
    config = load_profile(write_mini(tmp_path), [f"runtime.execution={execution}"])
    context = RunContext(config, RunOptions(), store_of(config, home), MemoryTracker(), Notes())
    assert type(open_executor(context)) is kind


def test_a_store_that_cannot_be_written_is_refused_when_it_is_planned_and_can_be_read(tmp_path, home, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != tmp_path
    )  # no mode of a folder keeps root from writing
    config = load_profile(write_mini(tmp_path), [f"store={tmp_path / 'team' / 'store'}"])
    store = store_of(config, home)
    with pytest.raises(
        ConfigError, match=rf"store = '{store.root}': this user cannot write to {tmp_path}; name a folder"
    ):
        plan_run(config, lifecycle, RunOptions(), store=store)


def test_the_store_is_the_profiles_or_the_state_folders(tmp_path, home):
    config = load_profile(write_mini(tmp_path))
    assert store_of(config, home).root == home.store
    elsewhere = load_profile(write_mini(tmp_path), [f"store={tmp_path}/elsewhere"])
    assert store_of(elsewhere, home).root == tmp_path / "elsewhere"


def planned_toys(tmp_path: Path, home: Home) -> tuple[list[PlannedStage], ArtifactStore]:
    config = load_profile(write_mini(tmp_path))
    store = store_of(config, home)
    return plan_stages(config, store, pipeline=two_toys), store


def test_what_is_all_there_is_taken_and_told_like_a_run(tmp_path, home):
    made, _, _ = run_once(tmp_path, home)
    notes = Notes()
    planned, store = planned_toys(tmp_path, home)
    assert results_if_all_cached(planned, store, notes, strict=Strictness()) == made
    assert notes.of("planned") == notes.of("started") == [("first", "HIT"), ("second", "HIT")]
    assert notes.of("finished") == [("first", "HIT", {"total": 1.5}), ("second", "HIT", {"total": 1.5})]


def test_nothing_is_taken_or_told_if_one_stage_is_to_be_computed(tmp_path, home):
    notes = Notes()
    planned, store = planned_toys(tmp_path, home)
    assert results_if_all_cached(planned, store, notes, strict=Strictness()) is None
    assert notes.events == []


def test_a_result_that_went_away_after_the_plan_is_not_taken(tmp_path, home):
    run_once(tmp_path, home)
    planned, store = planned_toys(tmp_path, home)
    discard(store.shared, name_of(planned[1].decision.key))
    assert results_if_all_cached(planned, store, Notes(), strict=Strictness()) is None


def test_a_run_of_hits_is_recorded_where_somebody_can_look(home, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert not is_watched(home)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    assert is_watched(home)
