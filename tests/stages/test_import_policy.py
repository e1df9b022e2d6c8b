"""A policy from outside is one of ours afterwards."""

import pytest

from rlhf_core.config.models import PretrainedModel
from rlhf_core.errors import ConfigError
from rlhf_core.models.materialize import materialize
from rlhf_core.types import PolicyRef
from stages.import_policy import ImportPolicyConfig, content_digests
from tests.support.policies import make_reward_model
from tests.support.workshop import Workshop


def test_a_folder_becomes_a_policy_with_its_weights_and_template(store, policy):
    config = ImportPolicyConfig(model=PretrainedModel(path=str(policy)))
    ref, _ = Workshop(store).run("import_policy", config, {}, files=content_digests(config))
    assert isinstance(ref, PolicyRef)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in store.path(ref).iterdir()}
    with pytest.raises(ConfigError, match="has changed since the run was planned"):
        Workshop(store).run("import_policy", config, {}, files={"model": "another"})


@pytest.mark.parametrize(
    ("model", "rule"),
    [
        ({"path": "./smolm2"}, r"model\.path = './smolm2': this folder does not exist"),
        ({"path": "smolm2"}, "must be the full commit of the Hub model 'smolm2'"),
        ({"path": ".", "gguf_file": "q4.gguf"}, r"model\.gguf_file = 'q4\.gguf': is not in \."),
    ],
)
def test_a_model_that_there_is_not_is_refused_by_the_plan(tmp_path, monkeypatch, model, rule):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rule):
        content_digests(ImportPolicyConfig(model=PretrainedModel(**model)))


@pytest.mark.parametrize("head", ["score", "value"])
def test_a_model_with_a_scalar_head_is_no_policy(tmp_path, policy, head):
    config = ImportPolicyConfig(model=PretrainedModel(path=str(make_reward_model(tmp_path / "rm", policy, head=head))))
    with pytest.raises(ConfigError, match=r"rm': has a scalar head: .* read it by stage = \"import_reward_model\""):
        content_digests(config)
    if head == "score":  # as one of the Hub, whose weights no plan reads
        with pytest.raises(ConfigError, match="has a scalar head"):
            materialize(config.model, tmp_path / "out")
