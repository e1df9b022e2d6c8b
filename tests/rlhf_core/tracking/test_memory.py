"""The tracker for tests keeps what it is told."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.tracking.memory import MemoryStageTracker, MemoryTracker


def test_a_stage_is_opened_once_per_key() -> None:
    tracker = MemoryTracker()
    tracker.start("run", run_id=None, params={"seed": 17}, tags={})
    first = tracker.stage("sft", key="k", params={}, tags={})
    first.finish("FAILED")
    second = tracker.stage("sft", key="k", params={}, tags={})
    assert second is first
    assert (second.tags["attempt"], second.status) == ("2", "RUNNING")
    assert tracker.params == {"seed": "17"}


def test_a_step_is_kept_once_per_metric() -> None:
    stage = MemoryStageTracker()
    stage.metrics(1, {"a": 1.0})
    stage.metrics(1, {"a": 2.0, "b": 3.0})
    assert stage.points == [(1, {"a": 1.0}), (1, {"b": 3.0})]


def test_a_cached_stage_points_to_the_run_that_made_it() -> None:
    tracker = MemoryTracker()
    made = tracker.stage("sft", key="k", params={}, tags={})
    tracker.cached("sft", run_id=None, key="k")
    assert tracker.tags["stage.sft"] == f"{made.run_id} (cached)"


def test_versions_count_up_per_name(tmp_path: Path) -> None:
    stage = MemoryStageTracker()
    assert stage.register("policy", "d1", aliases=["candidate"], tags={}) == "1"
    assert stage.register("other", "d1", aliases=[], tags={}) == "1"
    assert stage.register("policy", "d2", aliases=["candidate"], tags={}) == "2"
