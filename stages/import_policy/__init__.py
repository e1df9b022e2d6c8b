"""Declare and configure a policy from outside: `[[evaluate.baselines]]`."""

from rlhf_core.config.models import PretrainedModel
from rlhf_core.models.packages import local_folder, scalar_head
from rlhf_core.rewards.model import has_scalar_head
from rlhf_core.schema.base import Config
from rlhf_core.store.fingerprint import hash_files, list_files, tree_digest
from rlhf_core.types import PolicyRef
from stages import measured
from stages.declaration import stage


class ImportPolicyConfig(Config):
    """A causal language model to evaluate alongside the policies of the pipeline."""

    model: PretrainedModel
    """The model, by folder, Hub name with `revision`, or `package:<python package>/<folder>`; with a chat template."""


def content_digests(config: ImportPolicyConfig) -> dict[str, str]:
    """Digest of a local folder, for the stage's key; a Hub model is identified by its commit.

    Raises ConfigError if the model is missing or is not a language model, before the policies of the pipeline are
    trained.
    """
    folder = local_folder(config.model)
    if folder is None:
        return {}
    if has_scalar_head(folder):
        raise scalar_head(config.model.path)
    names = [name for name in list_files(folder) if "__pycache__" not in name.split("/")]
    return {"model": tree_digest(hash_files(folder, names))}


@stage(version=1, code="warn", page="evaluation.md", metrics=measured.fixed(), files=content_digests)
def import_policy(config: ImportPolicyConfig) -> PolicyRef:
    """A policy from outside, evaluated alongside the policies of the pipeline."""
