from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.execution.all_cached import is_watched, results_if_all_cached
from pipelines.execution.opening import store_of
from pipelines.execution.plan import PlannedStage, plan
from pipelines.flows.profile import load_profile
from pipelines.services.home import Home
from rlhf_core.stage.key import Strictness
from rlhf_core.store.artifacts import ArtifactStore
from tests.pipelines.execution.test_run import run_once
from tests.support.listener import Notes
from tests.support.small_pipeline import two_toys, write_mini


def planned_toys(tmp_path: Path, home: Home) -> tuple[list[PlannedStage], ArtifactStore]:
    config = load_profile(write_mini(tmp_path))
    store = store_of(config, home)
    return plan(config, store, pipeline=two_toys), store


def test_what_is_all_there_is_taken_and_told_like_a_run(tmp_path: Path, home: Home) -> None:
    made, _, _ = run_once(tmp_path, home)
    notes = Notes()
    planned, store = planned_toys(tmp_path, home)
    assert results_if_all_cached(planned, store, notes, strict=Strictness()) == made
    assert notes.of("planned") == notes.of("started") == [("first", "HIT"), ("second", "HIT")]
    assert notes.of("finished") == [("first", "HIT", {"total": 1.5}), ("second", "HIT", {"total": 1.5})]


def test_nothing_is_taken_or_told_if_one_stage_is_to_be_computed(tmp_path: Path, home: Home) -> None:
    notes = Notes()
    planned, store = planned_toys(tmp_path, home)
    assert results_if_all_cached(planned, store, notes, strict=Strictness()) is None
    assert notes.events == []


def test_a_result_that_went_away_after_the_plan_is_not_taken(tmp_path: Path, home: Home) -> None:
    run_once(tmp_path, home)
    planned, store = planned_toys(tmp_path, home)
    store.layout.key(planned[1].decision.key).unlink()
    assert results_if_all_cached(planned, store, Notes(), strict=Strictness()) is None


def test_a_run_of_hits_is_recorded_where_somebody_can_look(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert not is_watched(home)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.example")
    assert is_watched(home)
