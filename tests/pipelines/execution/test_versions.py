import json
from pathlib import Path

from pipelines.execution.plan import input_versions, version_lines
from rlhf_core.stage import versions
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from tests.support.toy_stage import NoEngines, RecordingTracker, stage_key, toy_spec


def policy(store: ArtifactStore, folder: Path, *, template: str, tokens: str = "{}") -> PolicyRef:
    folder.mkdir(exist_ok=True)
    (folder / "total.txt").write_text("1")
    (folder / "tokenizer.json").write_text(tokens)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return store.external(PolicyRef, folder)


def test_what_differs_from_when_the_stage_was_made_is_said(tmp_path, monkeypatch):
    store, (one, two) = ArtifactStore(tmp_path / "store"), (tmp_path / "one", tmp_path / "two")
    ref = policy(store, one, template="A")
    spec, twice = (toy_spec(inputs=dict.fromkeys(names, ref)) for names in (["policy"], ["policy", "reference"]))
    assert list(version_lines(store, spec, None)) == []
    execute(store, spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None)
    record = store.record(stage_key(spec))
    same = ["packages: the same versions as when it was made"]
    # A stage that reads the same folder twice, as PPO does: the record lists it once.
    assert list(version_lines(store, spec, record)) == list(version_lines(store, twice, None)) == same
    numpy = versions.versions()["numpy"]
    monkeypatch.setattr(versions, "versions", lambda: {"python": versions.platform.python_version(), "numpy": "0.1"})
    said = list(version_lines(store, spec, record))
    assert said == [f"numpy: {numpy} -> 0.1"], "packages that are not installed are no difference"
    other = policy(store, two, template="B")
    found = version_lines(store, toy_spec(inputs={"policy": other, "reference": other}), None)
    # The tokenizer's file holds the template, too.
    differing = [line for line in found if line.startswith(("chat template: ", "tokenizer: "))]
    assert len(differing) == 2 and all("->" in line for line in differing)


def test_a_template_in_a_file_of_its_own_counts_like_one_in_the_configuration(tmp_path):
    store = ArtifactStore(tmp_path / "store")
    ref = policy(store, tmp_path / "one", template="A")
    before = input_versions(store, [ref.uri])
    (tmp_path / "one" / "chat_template.jinja").write_text("B")
    after = input_versions(store, [ref.uri])
    assert after["chat template"] != before["chat template"] and after["tokenizer"] == before["tokenizer"]
    assert input_versions(store, [f"store://{'0' * 64}"]) == {}
