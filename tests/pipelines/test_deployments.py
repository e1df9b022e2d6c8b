from __future__ import annotations

import pytest
from jsonschema import ValidationError, validate

from pipelines.deployments import stage_parameters
from pipelines.profile import load_profile


@pytest.fixture(scope="module")
def forms() -> dict[str, tuple[dict, dict]]:
    found = {}
    for name, (flow, parameters) in stage_parameters(load_profile("tiny/full")).items():
        schema = flow.parameters.model_dump_for_openapi()
        found[name] = (schema, parameters)
    return found


def test_there_is_a_deployment_for_every_stage(forms: dict) -> None:
    assert set(forms) == {
        "prepare-data", "sft", "reward-model", "generate", "score", "select", "rejection-sampling", "iterative-dpo",
        "dpo", "ppo", "evaluate", "publish",
    }  # fmt: skip


def test_every_form_accepts_what_it_is_filled_with(forms: dict) -> None:
    for schema, parameters in forms.values():
        assert validate(parameters, schema) is None


def test_a_misspelt_key_is_refused_by_the_form(forms: dict) -> None:
    schema, parameters = forms["sft"]
    with pytest.raises(ValidationError, match="max_lenght"):
        validate(parameters | {"config": parameters["config"] | {"max_lenght": 3}}, schema)


def test_a_stage_run_alone_asks_for_the_same_seed_as_in_the_pipeline(forms: dict) -> None:
    assert forms["sft"][1]["settings"]["seed"] == load_profile("tiny/full").seed
