"""The stage of docs/add_a_stage.md, as it stands there: its declaration makes a flow, and it runs."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stages.config
from pipelines.flows.graph import Stages
from pipelines.prefect_flows.stage_flows import stage_flow
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.stage.code import module_digests
from rlhf_core.stage.key import StageSpec, key_payload
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.types import ArtifactRef, DemonstrationsRef
from stages import table
from tests.support.training import demonstrations
from tests.support.workshop import Workshop

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "add_a_stage.md").read_text()


@pytest.fixture
def declared(tmp_path) -> Iterator[Any]:
    """The declaration of the page, with its two modules where Python finds them."""
    blocks = re.findall(r"```python\n# (\S+\.py)[^\n]*\n(.*?)```", PAGE, flags=re.DOTALL)
    (config_path, config), (stage_path, stage), (_, declaration) = blocks[:3]
    (tmp_path / "config").mkdir()
    assert (config_path, stage_path) == ("stages/config/shorten.py", "stages/shorten.py")
    (tmp_path / "config" / "shorten.py").write_text(config)
    (tmp_path / "shorten.py").write_text(stage)
    stages.__path__.append(str(tmp_path))
    stages.config.__path__.append(str(tmp_path / "config"))
    importlib.invalidate_caches()
    before = {*vars(table)}
    exec(declaration, vars(table))
    yield table.STAGES["shorten"]
    del table.STAGES["shorten"]
    for name in {*vars(table)} - before:
        del vars(table)[name]
    stages.__path__.remove(str(tmp_path))
    stages.config.__path__.remove(str(tmp_path / "config"))
    for name in ("stages.shorten", "stages.config.shorten"):
        sys.modules.pop(name, None)


def test_the_stage_of_the_page_runs(declared, tmp_path):
    shop = Workshop(ArtifactStore(tmp_path / "store"))
    given = demonstrations(shop.store, tmp_path)
    rows = read_demonstrations(shop.store.path(given) / "train.parquet")
    longest = sorted(len(one.messages[-1].content) for one in rows)[len(rows) // 2]
    made, decision = shop.run("shorten", declared.config(max_characters=longest), {"demonstrations": given})
    kept = read_demonstrations(shop.store.path(made) / "train.parquet")
    assert kept == [one for one in rows if len(one.messages[-1].content) <= longest]
    assert shop.metrics(decision)["train"] == len(kept)


def test_its_declaration_makes_its_form_and_a_pipeline_can_call_it(declared):
    form = stage_flow(declared).parameters.model_dump_for_openapi()
    assert list(form["properties"]) == ["config", "settings", "demonstrations"]
    assert form["definitions"]["ShortenConfig"]["properties"]["max_characters"]["default"] == 200
    specs: list[StageSpec] = []

    def kept(spec: StageSpec, kind: type[ArtifactRef]) -> Any:
        specs.append(spec)

    given = DemonstrationsRef(uri="store://one", digest="one")
    pipeline = Stages(kept, seed=17, runtime=RuntimeConfig())
    pipeline.run(declared, "shorten", declared.config(), demonstrations=given)
    assert specs[0].inputs == {"demonstrations": given}
    assert key_payload(specs[0])["code"] == sha256_text(canonical_json(module_digests("stages.shorten")))
