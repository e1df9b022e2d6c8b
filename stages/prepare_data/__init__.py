"""Declare and configure `[prepare_data]`, and compute the digests of the local files that it names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rlhf_core.config.data import KINDS, DataConfig, Files, MixedWorlds, SupportWorld
from rlhf_core.config.models import BaseModelConfig, InitModel, PretrainedModel
from rlhf_core.data.chat_templates import CHATML as CHATML_TEMPLATE
from rlhf_core.data.chat_templates import SHIPPED
from rlhf_core.data.file_types import is_hub
from rlhf_core.errors import DataError
from rlhf_core.models.packages import PACKAGE, package_folder
from rlhf_core.schema.base import Config, added_option
from rlhf_core.store.fingerprint import hash_file, hash_files, tree_digest
from rlhf_core.types import PreparedDataRef, PromptsRef
from stages import measured
from stages.declaration import From, stage
from stages.planned_files import files_at, matching

MODEL_TEMPLATE = "model"


class PrepareDataConfig(Config):
    """The data, the base model, and the limits on rows."""

    data: DataConfig = SupportWorld()
    model: BaseModelConfig = InitModel()
    chat_template: str = MODEL_TEMPLATE
    """Chat template: `model` for the tokenizer's own, `chatml` for `rlhf_core.data.chat.CHATML_LIKE`, `deepseek_r1`,
    `nemotron_3` and `glm_4_5` for models whose own template has no exact loss masks, or the path of a Jinja file."""
    max_prompt_tokens: int = Field(128, ge=4)
    """Maximum number of tokens of a prompt, including its generation prompt."""
    max_tokens: int = Field(256, ge=8)
    """Maximum number of tokens of prompt and answer together."""
    preview_rows: int = Field(8, ge=1)
    """Number of rows per table in `preview.md` and in the tracker."""
    suite_ngram: int = added_option(0, ge=0)
    """Number of words in a row that a training row must not share with a prompt of a suite of `[[evaluate.suites]]`, for
    example 13 (GPT-3, arXiv 2005.14165, appendix C). Rows that begin with a whole prompt are left out, too. 0 compares none."""


def wanted_tables(data: DataConfig) -> list[str]:
    """The tables of training and of held-out prompts that `data` makes unless all their rows are dropped."""
    if isinstance(data, Files):
        filled = data.filled()
        return [table for table in KINDS if table in filled]
    rows = [world.model_dump() for world in (data.worlds if isinstance(data, MixedWorlds) else (data,))]
    return [table for table in KINDS if any(world.get(table) for world in rows)]


def content_digests(config: PrepareDataConfig) -> dict[str, str]:
    """SHA-256 of each local file that `config` names (data, model, template), by name, for the stage's key.

    Hub data and models are identified by their commit in the configuration. Raises DataError for missing data, and
    ConfigError for a `package:` model whose package is not installed.
    """
    digests = {}
    for name, (_, path) in local_files(config).items():
        if not path.exists() and not matching(path):
            raise DataError("prepare_data", name, "there is no such file or folder", "check the path")
        digests[name] = hash_file(path) if path.is_file() else tree_digest(hash_files(*files_at(path)))
    return digests


def local_files(config: PrepareDataConfig) -> dict[str, tuple[str, Path]]:
    """Configuration key and path of each local file and folder that `config` names, by name."""
    named: dict[str, str] = {}
    if isinstance(config.data, Files):
        named |= {source.path: f"data.sources[{source.name}]" for source in config.data.sources if not is_hub(source)}
    if isinstance(config.model, PretrainedModel) and Path(config.model.path).expanduser().is_dir():
        named[config.model.path] = "prepare_data.model.path"
    if config.chat_template not in (MODEL_TEMPLATE, CHATML_TEMPLATE, *SHIPPED):
        named[config.chat_template] = "prepare_data.chat_template"
    paths = {name: (key, Path(name).expanduser()) for name, key in named.items()}
    if isinstance(config.model, PretrainedModel) and config.model.path.startswith(PACKAGE):
        key = "prepare_data.model.path"
        paths[config.model.path] = (key, package_folder(config.model.path, key=key))
    return paths


@stage(
    version=3,
    code="strict",
    section="prepare_data",
    page="prepare_data.md",
    metrics=measured.prepare_data,
    files=content_digests,
)
def prepare_data(
    config: PrepareDataConfig,
    *,
    suites: Annotated[Mapping[str, PromptsRef] | None, From({}, when=lambda config: config.suite_ngram > 0)] = None,
) -> PreparedDataRef:
    """Read or generate the data, and make the base model. With `suite_ngram`, leave out training rows with prompts of `suites`."""
