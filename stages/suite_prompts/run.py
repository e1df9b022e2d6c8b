"""Prompts of a suite, read from a local file. A suite is used whole: the first malformed row is an error."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.config.data import Source
from rlhf_core.data.sources import read
from rlhf_core.data.tables import write_prompts
from rlhf_core.data.turns import turns_of
from rlhf_core.errors import ConfigError, DataError
from rlhf_core.stage.context import StageContext
from rlhf_core.store.fingerprint import canonical_json, sha256_text
from rlhf_core.suites.results import instructions_of, is_safe
from rlhf_core.types import Prompt, PromptsRef
from stages.suite_prompts import SuitePromptsConfig, content_digests

ONE_SLICE, DEFAULT_LABEL = "all", "label"
KEY = "evaluate.suites.prompts"


def run(config: SuitePromptsConfig, *, context: StageContext) -> PromptsRef:
    """Read the prompts with their labels; their slices become the sources."""
    check_file(config, context)
    prompts = read_prompts(config)
    check_file(config, context)
    write_prompts(context.out, prompts)
    slices = {prompt.source for prompt in prompts}
    return context.commit(PromptsRef, metrics={"prompts": float(len(prompts)), "slices": float(len(slices))})


def read_prompts(config: SuitePromptsConfig) -> list[Prompt]:
    """Read the prompts of the file. Raises DataError, with the line, for a row that is malformed or repeated."""
    source = Source.model_validate(
        {"name": "suite", "path": config.path, "file_type": config.file_type, "use": {"eval_prompts": 1.0}}
    )
    prompts: dict[str, Prompt] = {}
    for record in read(source):
        if config.max_prompts and len(prompts) == config.max_prompts:
            break
        try:
            if record.problem:
                raise DataError(record.problem)
            prompt = _prompt(record.row, config)
            if prompt.id in prompts:
                raise DataError("repeats an earlier row")
        except DataError as error:
            place = f"{Path(record.origin.file).name}:{record.origin.line}"
            raise DataError(KEY, place, str(error), "name its columns, or fix the row") from error
        prompts[prompt.id] = prompt
    if not prompts:
        raise DataError(f"{KEY}.path", config.path, "has no rows", "give a file with rows")
    return list(prompts.values())


def _prompt(row: Mapping[str, Any], config: SuitePromptsConfig) -> Prompt:
    if config.prompt not in row:
        raise DataError(f"has no column {config.prompt!r}")
    if config.slice and (config.slice not in row or row[config.slice] is None):
        raise DataError(f"has no column {config.slice!r}")
    messages = turns_of(row[config.prompt], role="user")
    if config.label != DEFAULT_LABEL and config.label not in row:
        raise DataError(f"has no column {config.label!r}")
    label = _text(row[config.label]) if config.label in row else ""
    check_label(label, config.label_kinds)
    identity = canonical_json([[[one.role, one.content] for one in messages], label])
    part = str(row[config.slice]) if config.slice else ONE_SLICE
    return Prompt(sha256_text(identity)[:16], messages, label, part, not isinstance(row[config.prompt], str))


def check_label(label: str, kinds: Collection[str]) -> None:
    """Raise DataError for a label that a suite of these kinds cannot read."""
    if "refusal" in kinds:
        is_safe(label)
    if "instructions" in kinds:
        instructions_of(label)


def _text(label: Any) -> str:
    if label is None:
        return ""
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def check_file(config: SuitePromptsConfig, context: StageContext) -> None:
    """Raise ConfigError unless the file matches the digest in the key."""
    if context.files and content_digests(config) != context.files:
        rule, remedy = "has changed since the run was planned", "run again: the new content gets its own key"
        raise ConfigError(f"{KEY}.path", config.path, rule, remedy)
