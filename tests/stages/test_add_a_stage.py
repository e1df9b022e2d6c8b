"""The stage of docs/add_a_stage.md, as it stands there: a profile reads it, its declaration makes a flow, and it runs."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stages
from pipelines.flows.graph import Stages
from pipelines.prefect_flows.stage_flows import stage_flow
from rlhf_core.config.runtime import RuntimeConfig
from rlhf_core.data.tables import read_demonstrations
from rlhf_core.stage.code import module_digests
from rlhf_core.stage.key import StageSpec, key_payload
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.types import ArtifactRef, DemonstrationsRef
from stages.table import STAGES
from tests.support.training import demonstrations
from tests.support.workshop import workshop

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_stage.md").read_text()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the two files of the page."""
    blocks = re.findall(r"```python\n# stages/(\S+\.py)\n(.*?)```", PAGE, flags=re.DOTALL)
    assert [name for name, _ in blocks] == ["shorten/__init__.py", "shorten/run.py"]
    for name, text in blocks:
        (tmp_path / "more" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "more" / name).write_text(text)
    return tmp_path / "more"


@pytest.fixture
def declared(folder, monkeypatch) -> Iterator[Any]:
    """The declaration of the page."""
    stages.__path__.append(str(folder))
    importlib.invalidate_caches()
    found = importlib.import_module("stages.shorten").shorten
    monkeypatch.setitem(STAGES, "shorten", found)
    yield found
    stages.__path__.remove(str(folder))
    del stages.shorten
    for name in ("stages.shorten", "stages.shorten.run"):
        sys.modules.pop(name, None)


def test_the_two_files_are_all_that_a_profile_needs(folder, tmp_path):
    (step,) = re.findall(r"```toml\n(.*?stage = \"shorten\".*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "short.toml").write_text(f'extends = "tiny/recipe"\n{step}')
    program = (
        "import sys, stages; stages.__path__.append(sys.argv[1])\n"
        "from pathlib import Path\nfrom pipelines.execution.plan import plan_stages\n"
        "from pipelines.flows.profile import load_profile\nfrom rlhf_core.store.artifacts import ArtifactStore\n"
        "config = load_profile(sys.argv[2])\n"
        "print([one.spec.module for one in plan_stages(config, ArtifactStore(Path(sys.argv[3]))) if one.label == 'short'])\n"
        "print(sorted({'torch', 'stages.shorten.run'} & set(sys.modules)))\n"
    )
    given = [sys.executable, "-c", program, str(folder), str(tmp_path / "short.toml"), str(tmp_path / "store")]
    done = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "['stages.shorten.run']\n[]\n", done.stderr


def test_the_stage_of_the_page_runs(declared, tmp_path):
    shop = workshop(tmp_path)
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
    assert key_payload(specs[0])["code"] == sha256_text(canonical_json(module_digests("stages.shorten.run")))
