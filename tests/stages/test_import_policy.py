"""A policy from outside is one of ours afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.config.engines import PretrainedModel
from rlhf_core.errors import ConfigError
from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.types import PolicyRef
from stages.config.import_policy import ImportPolicyConfig, content_digests
from tests.support.workshop import Workshop


def test_a_folder_becomes_a_policy_with_its_weights_and_template(store: ArtifactStore, policy: Path) -> None:
    config = ImportPolicyConfig(model=PretrainedModel(path=str(policy)))
    ref, _ = Workshop(store).run("import_policy", config, {}, files=content_digests(config))
    assert isinstance(ref, PolicyRef)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in store.path(ref).iterdir()}
    with pytest.raises(ConfigError, match="has changed since the run was planned"):
        Workshop(store).run("import_policy", config, {}, files={"model": "another"})
