from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.execution.plan import input_versions, version_lines
from rlhf_core.stage.key import stage_key
from rlhf_core.stage.run import execute
from rlhf_core.store import records
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from tests.support.toy_stage import NoEngines, RecordingTracker, toy_spec


def policy(store: ArtifactStore, folder: Path, *, template: str, tokens: str = "{}") -> PolicyRef:
    folder.mkdir(exist_ok=True)
    (folder / "total.txt").write_text("1")
    (folder / "tokenizer.json").write_text(tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return store.external(PolicyRef, folder)


def test_what_differs_from_when_the_stage_was_made_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(tmp_path / "store")
    spec = toy_spec(inputs={"policy": policy(store, tmp_path / "one", template="A")})
    tokens, template = (digest[:12] for digest in input_versions(store, [spec.inputs["policy"].uri]).values())  # type: ignore[union-attr]
    assert list(version_lines(store, spec, None)) == [f"tokenizer: {tokens}", f"chat template: {template}"]
    execute(store, spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None)
    record = store.record(stage_key(spec))
    assert list(version_lines(store, spec, record)) == [
        "packages: the same versions as when it was made",
        f"chat template: {template}, the same as when it was made",
        f"tokenizer: {tokens}, the same as when it was made",
    ]
    numpy = records.versions()["numpy"]
    monkeypatch.setattr(records, "versions", lambda: {"python": records.platform.python_version(), "numpy": "0.1"})
    said = list(version_lines(store, spec, record))
    assert f"numpy: {numpy} -> 0.1" in said and "pydantic: " in "".join(said)
    other = toy_spec(inputs={"policy": policy(store, tmp_path / "two", template="B")})
    found = [
        line.split(":")[0] for line in version_lines(store, other, None) if line.startswith("chat") and "->" in line
    ]
    assert found == ["chat template"], "compared with what the stage last was"


def test_a_template_in_a_file_of_its_own_counts_like_one_in_the_configuration(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "store")
    ref = policy(store, tmp_path / "one", template="A")
    before = input_versions(store, [ref.uri])
    (tmp_path / "one" / "chat_template.jinja").write_text("B")
    after = input_versions(store, [ref.uri])
    assert after["chat template"] != before["chat template"] and after["tokenizer"] == before["tokenizer"]
    assert input_versions(store, [f"store://{'0' * 64}"]) == {}
