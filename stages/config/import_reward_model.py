"""The configuration of `[import_reward_model]`, and the digest of the model that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhf_core.rewards.external import check_classifier
from rlhf_core.schema.base import OPERATIONAL, Config
from rlhf_core.store.fingerprint import hash_files, tree_digest

COPIED = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt")
"""Weights, configuration and tokenizer; what else lies in the folder (other formats, optimizer states) does not count."""


class ImportRewardModelConfig(Config):
    """A sequence classifier with one output, in a folder, as the reward model of the run."""

    path: Annotated[str, Field(min_length=1), OPERATIONAL]
    """Folder of the model and its tokenizer. Where it is does not belong to the key, what is in it does."""
    max_length: int = Field(2048, ge=8)
    """Most tokens of prompt and answer that it reads; longer ones are cut there."""


def content_digests(config: ImportRewardModelConfig) -> dict[str, str]:
    """Return the digest of what would be copied; ConfigError, before anything runs, for a folder that cannot be used."""
    folder = Path(config.path).expanduser()
    check_classifier(folder)
    return {"reward_model": tree_digest(hash_files(folder, copied(folder)))}


def copied(folder: Path) -> list[str]:
    """Return the names of the files that make the reward model, in order."""
    return sorted({path.name for pattern in COPIED for path in folder.glob(pattern) if path.is_file()})
