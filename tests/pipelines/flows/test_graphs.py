"""The graphs of all shipped profiles and of five variants are those of the record."""

import json
from pathlib import Path

import pytest

from pipelines.execution.plan import all_specs
from pipelines.flows.full import graph, lifecycle
from pipelines.flows.profile import load_profile
from rlhf_core.schema.base import keyed
from rlhf_core.types import ArtifactRef
from stages.table import STAGES

RECORD = json.loads((Path(__file__).parent / "graphs.json").read_text(encoding="utf-8"))


def read(value):
    if isinstance(value, ArtifactRef):
        return f"{type(value).__name__} {value.uri}"
    return {name: read(one) for name, one in value.items()}


def overrides(name):
    profile, _, sets = name.partition(" ")
    return profile, sets.split("\t") if sets else []


@pytest.fixture(autouse=True)
def no_files():
    """Files of users, which are not here, are not part of a graph."""
    files = {name: declared.files for name, declared in STAGES.items()}
    for declared in STAGES.values():
        object.__setattr__(declared, "files", None)
    yield
    for name, declared in STAGES.items():
        object.__setattr__(declared, "files", files[name])


@pytest.mark.parametrize("name", RECORD)
def test_the_graph_is_the_same(name):
    profile, sets = overrides(name)
    config = load_profile(profile, sets)
    specs = all_specs(config, lifecycle)
    found = [
        {
            "label": label,
            "stage": spec.name,
            "inputs": {one: read(value) for one, value in spec.inputs.items()},
            "options": keyed(spec.config),
            "engines": {one: value for one, value in spec.engines.items() if one not in ("files", "registry")},
            "functions": list(spec.callables),
            "seed": spec.seed,
        }
        for label, spec in specs.items()
    ]
    assert json.loads(json.dumps(found, default=str)) == RECORD[name]
    assert [node.label for node in graph(config)] == list(specs)  # what runs is the list of nodes
