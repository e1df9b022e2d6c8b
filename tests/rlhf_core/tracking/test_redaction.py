"""Parameters are flat and short."""

from __future__ import annotations

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.tracking.redaction import flatten, tags


def test_nested_values_become_dotted_keys() -> None:
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": {}}) == {"a.b": "1", "a.c": "[1, 2]", "d": "{}"}
    assert flatten({}) == {}


def test_a_configuration_is_flattened_through_its_fields() -> None:
    assert flatten(OptimizerConfig(learning_rate=3e-4))["learning_rate"] == "0.0003"
    assert flatten({"sft": {"optimizer": OptimizerConfig()}})["sft.optimizer.eps"] == "1e-08"


def test_a_long_value_is_cut_to_six_thousand_characters() -> None:
    assert len(flatten({"text": "x" * 9000})["text"]) == 6000


def test_a_tag_name_keeps_to_the_characters_that_mlflow_takes() -> None:
    assert tags({"a#b": "c"}) == {"a_b": "c"}
