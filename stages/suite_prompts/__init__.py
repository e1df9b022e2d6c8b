"""Declare and configure the prompts of a suite, read from a local file."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.data import FileType
from rlhf_core.errors import ConfigError
from rlhf_core.schema.base import OPERATIONAL, Config, added_option
from rlhf_core.store.fingerprint import hash_file
from rlhf_core.types import PromptsRef
from stages import measured
from stages.declaration import stage


class SuitePromptsConfig(Config):
    """The file with the prompts of a suite, and its columns."""

    path: Annotated[str, Field(min_length=1), OPERATIONAL]
    """A local file: JSONL, JSON, CSV, Parquet or Arrow. Its content belongs to the stage's key, its path does not."""
    file_type: FileType = "auto"
    """Type of the file; `auto` infers it from the name."""
    prompt: str = "prompt"
    """Column with the prompt, text or turns."""
    label: str = "label"
    """Column with the reference of the answer; objects and lists are kept as JSON. Rows may lack the column
    `label`, but not one of another name."""
    slice: str = ""
    """Column with the group of the row in tables by slice; if empty, all rows are the slice `all`."""
    max_prompts: int = Field(0, ge=0)
    """Number of rows to use, from the start; 0 uses all."""
    label_kinds: tuple[Literal["instructions", "refusal"], ...] = added_option(())
    """Label formats that the suites of these prompts read, which are checked; set by the pipeline."""


def content_digests(config: SuitePromptsConfig) -> dict[str, str]:
    """SHA-256 of the file, for the stage's key. Raises ConfigError for a missing file."""
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise ConfigError("evaluate.suites.prompts.path", config.path, "is not a file", "give a local file")
    return {"prompts": hash_file(path)}


@stage(
    version=1,
    code="strict",
    page="evaluation.md",
    metrics=measured.fixed("prompts", "slices"),
    files=content_digests,
)
def suite_prompts(config: SuitePromptsConfig) -> PromptsRef:
    """The prompts of a suite, from a local file."""
