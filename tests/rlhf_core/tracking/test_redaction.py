"""Parameters are flat and short, and no secret passes."""

from __future__ import annotations

import pytest

from rlhf_core.config.engines import OptimizerConfig
from rlhf_core.tracking.redaction import flatten, hidden, tags, without_secrets


def test_nested_values_become_dotted_keys() -> None:
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": {}}) == {"a.b": "1", "a.c": "[1, 2]", "d": "{}"}
    assert flatten({}) == {}


def test_a_configuration_is_flattened_through_its_fields() -> None:
    assert flatten(OptimizerConfig(learning_rate=3e-4))["learning_rate"] == "0.0003"
    assert flatten({"sft": {"optimizer": OptimizerConfig()}})["sft.optimizer.eps"] == "1e-08"


def test_a_long_value_is_cut_to_six_thousand_characters() -> None:
    assert len(flatten({"text": "x" * 9000})["text"]) == 6000


@pytest.mark.parametrize(
    "key", ["token", "hub.hf_token", "aws.secret", "db_password", "openai_api_key", "x.credentials"]
)
def test_the_value_of_a_secret_is_hidden(key: str) -> None:
    assert hidden(key, "hunter2") == "***"


@pytest.mark.parametrize(("key", "value"), [("eos_token", "</s>"), ("max_tokens", "64"), ("sampling.pad_token", "<p>")])
def test_tokens_of_a_tokenizer_are_no_secrets(key: str, value: str) -> None:
    assert hidden(key, value) == value


def test_a_secret_is_hidden_by_its_looks_wherever_it_stands() -> None:
    text = "git clone https://me:hunter2@host/x with hf_abcdefghijklmnopqrstuv and sk-abcdefghijklmnop1234"
    assert without_secrets(text) == "git clone https://***@host/x with *** and ***"


def test_a_tag_name_keeps_to_the_characters_that_mlflow_takes() -> None:
    assert tags({"a#b": "c"}) == {"a_b": "c"}
