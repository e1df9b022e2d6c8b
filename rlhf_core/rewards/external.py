"""Check reward models from outside: the contents that their folders need, and the probes of their contracts.

One of ours is a decoder with a linear head `score` of one output, read at a sequence's last token, and a tokenizer with a
chat template. `AutoModelForSequenceClassification` writes such folders, and so does OpenRLHF, which leaves the number of
outputs out of `config.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlhf_core.errors import ConfigError, explain
from rlhf_core.models.packages import refuse_adapter
from rlhf_core.types import Message

HEAD = "score.weight"
OTHER_HEADS = ("value_head.weight", "v_head.summary.weight", "classifier.weight", "classifier.out_proj.weight")
"""Heads of OpenRLHF up to 0.5, TRL's value models, and encoders."""

GIT_LFS = b"version https://git-lfs"
"""How the small text begins that git leaves in place of a large file that has not been fetched."""

PROBES = (
    ("What is 12 + 30?", "12 + 30 is 42."),
    ("What is 12 + 30?", "I do not know, and I do not care."),
    ("Name a color of the rainbow.", "Green."),
    ("Name a color of the rainbow.", "The rainbow is a bow of rain. Rain is wet. Wet is not dry."),
    ("How do I boil an egg?", "Put it in boiling water for eight minutes, then cool it under the tap."),
    ("How do I boil an egg?", "egg egg egg egg egg egg egg egg"),
    ("Write a sentence about the sea.", "The sea was calm, and the boats came home before dark."),
    ("Is the earth flat?", "No. It is very nearly a sphere, a little wider at the equator."),
)
"""Questions and answers that are scored at the import, so that every later use can tell that it reads the same."""


def check_classifier(folder: Path) -> None:
    """Raise ConfigError, with what to do, for a folder that cannot be read as a reward model. No weight is loaded."""
    refuse_adapter(folder)
    if not (folder / "config.json").is_file():
        raise _refused(folder, "is not a folder with a config.json", "download the model first, and give its folder")
    config = _table(folder, "config.json")
    if "auto_map" in config:
        raise _refused(folder, "needs its own code (auto_map)", 'serve it, and configure the server: type = "remote"')
    shapes = _shapes(folder)
    if not shapes:
        raise _refused(
            folder, "contains no safetensors files", "load it with transformers and save it with save_pretrained"
        )
    if HEAD not in shapes:
        other = next((name for name in _other_heads(config) if name in shapes), "")
        if other:
            raise _refused(folder, f"its head is {other}", f"only a decoder's {HEAD} is read; rename a decoder's")
        remedy = "use a sequence classifier; to train one from a language model, use [reward_model]"
        raise _refused(folder, f"has no score head ({HEAD}): it is probably a language model", remedy)
    outputs = shapes[HEAD][0]
    if outputs != 1:
        raise _refused(folder, f"has {outputs} outputs", "use a reward model with one output (num_labels = 1)")
    if "score.bias" in shapes:
        raise _refused(folder, "its score head has a bias, which would be ignored", 'serve it: type = "remote"')
    if config.get("normalize_reward") and (config.get("mean", 0.0), config.get("std", 1.0)) != (0.0, 1.0):
        rule = f"OpenRLHF subtracts {config.get('mean')} from its scores and divides by {config.get('std')}, which this program does not"
        remedy = 'set normalize_reward to false in its config.json and normalise = "running" in the reward\'s term'
        raise _refused(folder, rule, remedy)
    _check_template(folder)


def single_output(config: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` that says of a head of one output what transformers would else take to be two."""
    return {**config, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def probe_messages() -> list[tuple[tuple[Message, ...], str]]:
    """Return the probes as prompts and answers."""
    return [((Message("user", question),), answer) for question, answer in PROBES]


def _other_heads(config: dict[str, Any]) -> tuple[str, ...]:
    prefix = config.get("value_head_prefix")
    return (*((f"{prefix}.weight",) if prefix else ()), *OTHER_HEADS)


def _check_template(folder: Path) -> None:
    tokenizer = folder / "tokenizer_config.json"
    if not tokenizer.is_file():
        raise _refused(
            folder, "contains no tokenizer", "save the tokenizer that it was trained with in the same folder"
        )
    inside = "chat_template" in _table(folder, tokenizer.name)
    if not inside and not (folder / "chat_template.jinja").is_file():
        remedy = "add the template that it was trained with as chat_template.jinja"
        raise _refused(folder, "its tokenizer has no chat template", remedy)


def _shapes(folder: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy") as tensors:
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise _unreadable(folder, file.name, f"is not a safetensors file ({error})") from error
    return shapes


def _table(folder: Path, name: str) -> dict[str, Any]:
    try:
        table = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise _unreadable(folder, name, f"is not valid JSON ({error})") from error
    if not isinstance(table, dict):
        raise _unreadable(folder, name, f"must be a JSON object, not {type(table).__name__}")
    return table


def _unreadable(folder: Path, name: str, rule: str) -> ConfigError:
    with (folder / name).open("rb") as file:
        pointer = file.read(len(GIT_LFS)) == GIT_LFS
    if pointer:
        return _refused(
            folder, f"its {name} is a git-lfs pointer, not the file itself", "run `git lfs pull` in that folder"
        )
    return _refused(folder, f"its {name} {rule}", "download the file again")


def _refused(folder: Path, rule: str, remedy: str) -> ConfigError:
    return ConfigError(explain("import_reward_model.path", str(folder), rule, remedy))
