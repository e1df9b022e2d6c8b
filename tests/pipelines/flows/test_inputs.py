import pytest

from pipelines.flows.inputs import find_artifact
from rlhf_core.errors import ArtifactError
from rlhf_core.stage.run import execute
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import ArtifactRef, PolicyRef, PreparedDataRef, PromptsRef
from tests.support.toy_stage import NoEngines, RecordingTracker, ToyConfig, toy_spec


def make(store: ArtifactStore, label: str, config: ToyConfig) -> ArtifactRef:
    spec = toy_spec(config, label=label)
    return execute(store, spec, runtime=NoEngines(), tracker=RecordingTracker(), progress=lambda *_: None)[0]


def test_a_label_means_the_newest_artifact_of_that_stage(tmp_path):
    store = ArtifactStore(tmp_path)
    make(store, "sft", ToyConfig(kl_coef=0.1))
    newest = make(store, "sft", ToyConfig(kl_coef=0.2))
    assert find_artifact(store, PolicyRef, "sft") == newest


def test_a_label_that_was_a_hit_means_what_was_hit(tmp_path):
    store = ArtifactStore(tmp_path)
    made = make(store, "rejection_sampling/generate", ToyConfig(kl_coef=0.1))
    make(store, "generate", ToyConfig(kl_coef=0.2))
    assert make(store, "generate", ToyConfig(kl_coef=0.1)) == made  # a hit: no record carries the label
    assert find_artifact(store, PolicyRef, "generate") == made


def test_an_input_that_is_named_counts_as_used(tmp_path, monkeypatch):
    store, used = ArtifactStore(tmp_path), []
    made = make(store, "sft", ToyConfig())
    monkeypatch.setattr(store, "used", used.append)
    for name in ("sft", made.digest[:12]):
        find_artifact(store, PolicyRef, name)
    assert used == [store.records()[0].key] * 2


def test_a_part_of_an_artifact_follows_a_dot(tmp_path):
    store = ArtifactStore(tmp_path)
    data = make(store, "prepare_data", ToyConfig(trouble="children"))
    assert isinstance(data, PreparedDataRef)
    assert find_artifact(store, PolicyRef, "prepare_data.base") == data.base


def test_the_beginning_of_a_digest_is_enough(tmp_path):
    store = ArtifactStore(tmp_path)
    made = make(store, "sft", ToyConfig())
    assert find_artifact(store, PolicyRef, made.digest[:8]) == made


def test_a_folder_of_the_user_is_an_artifact_too(tmp_path):
    folder = tmp_path / "my_model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    ref = find_artifact(ArtifactStore(tmp_path / "store"), PolicyRef, str(folder))
    assert ref.uri == f"file://{folder}" and len(ref.digest) == 64


def test_what_nothing_means_is_refused_with_what_there_is(tmp_path):
    store = ArtifactStore(tmp_path)
    with pytest.raises(ArtifactError, match="the store has none: run `rlhf run tiny/full` first"):
        find_artifact(store, PolicyRef, "sft")
    make(store, "sft", ToyConfig())
    with pytest.raises(ArtifactError, match=r"policy = 'ppo': is neither .*; choose from sft"):
        find_artifact(store, PolicyRef, "ppo")
    make(store, "prepare_data", ToyConfig(kl_coef=0.1, trouble="children"))
    with pytest.raises(ArtifactError, match=r"; did you mean prepare_data.base\?"):
        find_artifact(store, PolicyRef, "prepare_dat.base")


def test_an_artifact_of_another_kind_is_not_taken(tmp_path):
    store = ArtifactStore(tmp_path)
    make(store, "sft", ToyConfig())
    with pytest.raises(ArtifactError, match=r"prompts = .sft.: is a policy, and must be prompts"):
        find_artifact(store, PromptsRef, "sft")
