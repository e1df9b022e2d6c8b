"""Declare and configure `[import_reward_model]`, and compute the digest of the model that it names."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.rewards.model import check_classifier
from rlhf_core.schema.base import OPERATIONAL, Config, added_option
from rlhf_core.store.fingerprint import hash_files, tree_digest
from rlhf_core.types import PolicyRef, RewardModelRef
from stages import measured
from stages.declaration import From, stage

COPIED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")
"""Patterns of the weights, configuration and tokenizer; other files (other formats, optimizer states) do not count."""


class ImportRewardModelConfig(Config):
    """A sequence classifier with one output, in a folder, that becomes the reward model of the run."""

    path: Annotated[str, Field(min_length=1), OPERATIONAL]
    """Folder of the model and its tokenizer. Its content belongs to the stage's key, its path does not."""
    max_length: int = Field(2048, ge=8)
    """Maximum number of tokens of prompt and answer that the model reads; longer ones are cut."""
    template: Literal["own", "policy"] = added_option("own")
    """Chat template of the scores: the model's own, which has to render the same tokens as the policy's, or the
    policy's template, for models that were trained on text without roles."""


def content_digests(config: ImportRewardModelConfig) -> dict[str, str]:
    """Digest of the files to copy. Raises ConfigError for an unusable folder, before anything runs."""
    folder = Path(config.path).expanduser()
    check_classifier(folder, template=config.template == "own")
    return {"reward_model": tree_digest(hash_files(folder, copied(folder)))}


def copied(folder: Path) -> list[str]:
    """Sorted names of the reward model's files."""
    return sorted({path.name for pattern in COPIED for path in folder.glob(pattern) if path.is_file()})


@stage(
    version=1,
    code="warn",
    engines=("trainer",),
    page="reward_model.md",
    metrics=measured.fixed("probe/mean", "probe/std", "probes"),
    files=content_digests,
)
def import_reward_model(
    config: ImportRewardModelConfig, *, policy: Annotated[PolicyRef, From("prepare_data.base", default="base")]
) -> RewardModelRef:
    """A reward model from outside, checked against the tokens of `policy`."""
