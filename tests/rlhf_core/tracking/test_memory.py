"""The tracker in memory keeps what it is given; parameters are flat and short."""

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.tracking.memory import MemoryStageTracker, MemoryTracker
from rlhf_core.tracking.redaction import flatten, tags


def test_a_stage_is_opened_once_per_key():
    tracker = MemoryTracker()
    tracker.start("run", run_id=None, params={"seed": 17}, tags={})
    first = tracker.stage("sft", key="k", params={}, tags={})
    first.finish("FAILED")
    second = tracker.stage("sft", key="k", params={}, tags={})
    assert second is first
    assert (second.tags["attempt"], second.status) == ("2", "RUNNING")
    assert tracker.params == {"seed": "17"}


def test_a_step_is_kept_once_per_metric():
    stage = MemoryStageTracker()
    stage.metrics(1, {"a": 1.0})
    stage.metrics(1, {"a": 2.0, "b": 3.0})
    assert stage.points == [(1, {"a": 1.0}), (1, {"b": 3.0})]


def test_a_cached_stage_points_to_the_run_that_made_it():
    tracker = MemoryTracker()
    made = tracker.stage("sft", key="k", params={}, tags={})
    tracker.cached("sft", run_id=None, key="k")
    assert tracker.tags["stage.sft"] == f"{made.run_id} (cached)"


def test_versions_count_up_per_name(tmp_path):
    stage = MemoryStageTracker()
    assert stage.register("policy", "d1", aliases=["candidate"], tags={}) == "1"
    assert stage.register("other", "d1", aliases=[], tags={}) == "1"
    assert stage.register("policy", "d2", aliases=["candidate"], tags={}) == "2"


def test_nested_values_become_dotted_keys():
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": {}}) == {"a.b": "1", "a.c": "[1, 2]", "d": "{}"}
    assert flatten({}) == {}


def test_a_configuration_is_flattened_through_its_fields():
    assert flatten(OptimizerConfig(learning_rate=3e-4))["learning_rate"] == "0.0003"
    assert flatten({"sft": {"optimizer": OptimizerConfig()}})["sft.optimizer.eps"] == "1e-08"


def test_a_long_value_is_cut_to_six_thousand_characters():
    assert len(flatten({"text": "x" * 9000})["text"]) == 6000


def test_a_tag_name_keeps_to_the_characters_that_mlflow_takes():
    assert tags({"a#b": "c"}) == {"a_b": "c"}
