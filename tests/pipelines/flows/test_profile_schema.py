import tomllib
from typing import Any

import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from pipelines.cli.start_verbs import STARTER
from pipelines.flows.profile import PipelineConfig, shipped_profiles
from pipelines.flows.profile_schema import profile_schema

FILES = [*sorted(shipped_profiles().rglob("*.toml")), STARTER / "profile.toml"]


@pytest.fixture(scope="module")
def validator() -> Draft7Validator:
    schema = profile_schema()
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_shipped_profile_fits_the_schema(file, validator):
    assert [error.message for error in validator.iter_errors(tomllib.loads(file.read_text()))] == []


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('sft = "none"', True),
        ('dpo.loss = "ipo"', True),
        ("ppo.loss.clip_low = 0.1", True),
        ('gates = {quality = "none"}', True),
        ("sfft.max_length = 64", False),
        ("sft.max_lenght = 64", False),
        ("sft.max_length = true", False),
        ('dpo.loss = "ippo"', False),
    ],
)
def test_the_schema_knows_what_a_file_may_hold(text, fits, validator):
    tree: dict[str, Any] = tomllib.loads(text)
    assert validator.is_valid(tree) is fits


def test_a_key_of_the_schema_is_described(validator):
    table = validator.schema["$defs"]["SFTConfig"]["properties"]["max_length"]
    assert table["description"].startswith("Maximum number of tokens") and table["default"] == 256


def test_defaults_in_the_schema_of_forms_fit_it():
    schema = PipelineConfig.model_json_schema()
    validator = Draft202012Validator(schema)
    for table, fields in schema["$defs"].items():
        for key, field in fields.get("properties", {}).items():
            if field.get("default") is not None:
                one = validator.evolve(schema=field | {"$defs": schema["$defs"]})
                assert [error.message for error in one.iter_errors(field["default"])] == [], (table, key)
