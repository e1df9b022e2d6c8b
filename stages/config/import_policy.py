"""Configure a policy from outside: `[[evaluate.baselines]]`."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config.engines import PretrainedModel
from rlhf_core.models.packages import PACKAGE, package_folder
from rlhf_core.schema.base import Config
from rlhf_core.store.fingerprint import hash_files, list_files, tree_digest


class ImportPolicyConfig(Config):
    """A causal language model that takes part in the evaluation beside the policies of the pipeline."""

    model: PretrainedModel
    """The model, by folder, Hub name with `revision`, or `package:<python package>/<folder>`; with a chat template."""


def content_digests(config: ImportPolicyConfig) -> dict[str, str]:
    """Return the digest of a local folder, for the stage's key; a Hub model is identified by its commit.

    Raises ConfigError for a `package:` model whose package is not installed.
    """
    path = config.model.path
    folder = package_folder(path) if path.startswith(PACKAGE) else Path(path).expanduser()
    if not folder.is_dir():
        return {}
    names = [name for name in list_files(folder) if "__pycache__" not in name.split("/")]
    return {"model": tree_digest(hash_files(folder, names))}
