import ast
import importlib
import inspect
import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from pipelines.execution.plan import plan_stages
from pipelines.flows.profile import load_profile
from pipelines.prefect_flows.stage_flows import STAGE_FLOWS
from rlhf_core.stage.code import module_digests
from rlhf_core.stage.context import StageContext
from rlhf_core.stage.key import key_payload, payload_key
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef
from stages import declaration, table
from stages.table import STAGES

Stage = declaration.Stage[..., Any]
ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    "prepare_data": "0db7d9c5319af52b",
    "sft": "6fbf4c39c44be5c1",
    "reward_model": "537067d0d4a2765f",
    "rejection_sampling/generate": "dc79f212af9e773d",
    "rejection_sampling/score": "0ced9b05836ada95",
    "rejection_sampling/select": "e0f4ef38cbe5e86f",
    "rejection_sampling/sft": "19ea109c5004de7d",
    "iterative_dpo/round_1/generate": "dc79f212af9e773d",
    "iterative_dpo/round_1/score": "a4e6ff81f6842e6c",
    "iterative_dpo/round_1/select": "6d8f5cfd1f61faff",
    "iterative_dpo/round_1/dpo": "69973ed8628e7b02",
    "iterative_dpo/round_2/generate": "467afab5f70430a6",
    "iterative_dpo/round_2/score": "377ca802d6ba6595",
    "iterative_dpo/round_2/select": "4695bd4d64548cc1",
    "iterative_dpo/round_2/dpo": "dd6e5934a6001b3c",
    "ppo": "78df7e8ffa5a4a07",
    "evaluate/base/generate": "f669ce16f9ece99b",
    "evaluate/sft/generate": "5b2763aff2254099",
    "evaluate/rejection_sampling/generate": "5df2a99f38d1c73a",
    "evaluate/iterative_dpo/generate": "47c5f44892ec21ca",
    "evaluate/ppo/generate": "55719e54c0f599a0",
    "evaluate": "40bda4fb173f241a",
    "publish": "f3d400899d1bac76",
}
"""Label -> first digits of the key of each stage of tiny/full, planned into an empty store, without the digest of its code.

Refactoring must not change these keys.
"""


@pytest.fixture(params=STAGES.values(), ids=STAGES)
def stage(request) -> Stage:
    declared: Stage = request.param
    return declared


def test_every_stage_is_declared_and_every_declaration_has_a_stage():
    folders = {path.parent.name for path in (ROOT / "stages").glob("*/__init__.py")}
    assert folders == {path.parent.name for path in (ROOT / "stages").glob("*/run.py")} == {*STAGES}
    assert {one.name: one.module for one in STAGES.values()} == {name: f"stages.{name}.run" for name in folders}


def test_the_names_of_0_2_give_the_declarations_with_a_warning():
    with pytest.warns(
        FutureWarning, match=r"stages\.table\.sft is now stages\.sft\.sft; the former name works"
    ) as said:
        assert table.sft is STAGES["sft"]
    with pytest.warns(FutureWarning, match=r"stages\.table\.From is now stages\.declaration\.From; the former"):
        assert table.From is declaration.From
    assert len(said) == 1 and not hasattr(table, "no_stage")


def test_the_keys_of_a_pipeline_are_what_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_HOME", str(tmp_path / "home"))
    for variable in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(variable, raising=False)
    found = {}
    for planned in plan_stages(load_profile("tiny/full"), ArtifactStore(tmp_path / "store")):
        payload = key_payload(planned.spec)
        assert ("code" in payload) == (STAGES[planned.spec.name].code == "strict")
        found[planned.label] = payload_key({name: part for name, part in payload.items() if name != "code"})[:16]
    assert found == KEYS


def test_planning_imports_no_stage_and_nothing_that_computes(tmp_path):
    program = (
        "import json, sys\nfrom pathlib import Path\n"
        "from pipelines.execution.plan import plan_stages\nfrom pipelines.flows.profile import load_profile\n"
        "from rlhf_core.store.artifacts import ArtifactStore\n"
        "assert plan_stages(load_profile('tiny/full'), ArtifactStore(Path(sys.argv[1])))\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    made = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = set(json.loads(made.stdout))
    assert (
        {f"stages.{name}.run" for name in STAGES} & imported == set() < {f"stages.{name}" for name in STAGES} & imported
    )
    assert {"torch", "transformers", "numpy", "pyarrow", "ray", "vllm", "prefect", "mlflow"} & imported == set()


def test_a_declaration_has_the_inputs_and_the_output_of_the_function_that_runs(stage):
    run = importlib.import_module(stage.module).run
    types_of = get_type_hints(run)
    defaults = {name: one.default for name, one in inspect.signature(run).parameters.items()}
    assert types_of.pop("context") is StageContext
    assert set(parts_of(types_of.pop("config"))) == set(stage.configs)
    output = parts_of(types_of.pop("return"))
    assert output == [stage.output] if len(output) == 1 else stage.output is ArtifactRef
    assert set(types_of) == set(stage.inputs)
    for name, row in stage.inputs.items():
        kind = next(one for one in parts_of(types_of[name]) if one is not type(None))
        assert kind == (dict[str, row.kind] if row.many else row.kind), name
        may_be_left_out = row.optional or (row.when is not declaration.always and not row.instead)
        assert not may_be_left_out or defaults[name] is None, name


def parts_of(kind: Any) -> list[Any]:
    """Return the members of a union; a type that is none, alone."""
    return list(get_args(kind)) if get_origin(kind) in (Union, types.UnionType) else [kind]


def test_a_declaration_has_the_engines_that_the_code_of_the_stage_leases(stage):
    leased = {engine for module in module_digests(stage.module) for engine in engines_in(module)}
    assert set(stage.engines) == leased


def engines_in(module: str) -> Iterator[str]:
    """Yield `trainer`, `sampler` and `registry` for what a module asks of `runtime` and of `tracker`."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2]
            if owner == "runtime" and node.func.attr in ("trainer", "sampler"):
                yield node.func.attr
            if owner == "tracker" and node.func.attr == "register":
                yield "registry"


def test_how_other_stages_are_declared_is_not_in_the_key_of_a_stage(stage):
    found = set(module_digests(stage.module))
    assert stage.module in found and not {"stages.table", "stages.declaration", "stages.measured"} & found


def test_a_declaration_has_a_page_in_the_documents_that_names_the_stage(stage):
    text = (ROOT / "docs" / stage.page).read_text().lower()
    assert stage.name in text or stage.name.replace("_", " ") in text


def test_a_stage_has_a_flow_whose_form_asks_for_its_configuration_and_its_inputs(stage):
    flow = STAGE_FLOWS[stage.name]
    form = flow.parameters.model_dump_for_openapi()
    assert list(form["properties"]) == ["config", "settings", *stage.inputs]
    starts = {name: row.start if isinstance(row.start, str) else dict(row.start) for name, row in stage.inputs.items()}
    assert {name: form["properties"][name]["default"] for name in stage.inputs} == starts
    assert form["required"] == ["config", "settings"]
    assert flow.description == stage.about


def test_what_a_form_names_as_an_input_is_made_by_a_stage_of_that_output(stage):
    for row in stage.inputs.values():
        for name in [row.start] if isinstance(row.start, str) else row.start.values():
            made_by = STAGES.get(name.rpartition("/")[2])
            if "." in name or not name or made_by is None:
                continue
            assert issubclass(made_by.output, row.kind), f"{stage.name}: {name}"


def test_no_stage_depends_on_the_configuration_of_samplers(stage):
    """The code of a strict stage is in its key, and a plan names changed code: a new sampler must be in neither.

    A stage without engines depends on no configuration of engines at all.
    """
    read = module_digests(stage.module)
    assert "rlhf_core.config.runtime" not in read
    assert "trainer" in stage.engines or stage.code != "strict" or "rlhf_core.config.engines" not in read
