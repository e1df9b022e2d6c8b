"""Rewards for format: thoughts in their tags, and JSON that fits a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rlhf_core.errors import ConfigError, DataError, explain
from rlhf_core.rewards.library.fences import fences, last_fence
from rlhf_core.rewards.library.labels import against_labels, needed

_JSON = re.compile(r"jsonc?|application")


def think_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    opened: bool = False,
    answer_tag: bool = False,
    **columns: Any,
) -> list[float | None]:
    """Score 1.0 if the answer is one `<think>` block followed by more text that is not empty, else 0.0.

    `opened`: the prompt ends with `<think>`, so the answer starts inside the block. `answer_tag`: the rest must be one
    `<answer>` block. Neither part may hold any of the tags again.
    """
    opening = "" if opened else r"\s*<think>"
    closing = r"\s*<answer>(.*?)</answer>\s*" if answer_tag else r"(.*)"
    form = re.compile(rf"{opening}(.*?)</think>{closing}", re.DOTALL)
    tag = re.compile(r"</?(?:think|answer)>") if answer_tag else re.compile(r"</?think>")

    def well_formed(text: str) -> bool:
        match = form.fullmatch(text)
        return match is not None and all(part.strip() and not tag.search(part) for part in match.groups())

    return [float(well_formed(text)) for text in completions]


def json_schema(
    prompts: Sequence[str],
    completions: Sequence[str],
    labels: Sequence[str | None],
    *,
    schema: dict[str, Any] | None = None,
    **columns: Any,
) -> list[float | None]:
    """Score 1.0 if the answer is JSON, bare or in its last code fence, that fits `schema`, else 0.0.

    Without `schema` each label is one; None where the label is missing, DataError where it is no schema, or one without
    requirements. Nothing is fetched for a `$ref` elsewhere.
    """
    jsonschema, referencing = needed("jsonschema", "jsonschema"), needed("referencing", "referencing")

    def refusal(given: Any, rule: str) -> DataError | ConfigError:
        return (DataError if schema is None else ConfigError)(explain("schema", given, rule, "mend it"))

    def validator(given: Any) -> Any:
        kind = jsonschema.validators.validator_for(given, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(given)
        except jsonschema.SchemaError as error:
            raise refusal(given, f"is no JSON schema: {error.message}") from None
        if not isinstance(given, dict) or not set(given) & set(kind.VALIDATORS):
            raise refusal(given, "asks for nothing: any JSON would fit it, or none")
        return kind(given, registry=referencing.Registry())

    def fits(text: str, checker: Any) -> float:
        value = _read_json(text)
        return float(value is not None and checker.is_valid(value[0]))

    if schema is not None:
        checker = validator(schema)
        return [fits(text, checker) for text in completions]
    return against_labels(completions, labels, lambda text, label: fits(text, validator(_schema_of(label))))


def _schema_of(label: str) -> Any:
    try:
        return json.loads(label)
    except (ValueError, RecursionError) as error:
        raise DataError(explain("label", label[:200], f"is no JSON: {error}", "give the schema as argument")) from None


def _read_json(text: str) -> tuple[Any] | None:
    """The parsed value in a tuple, because it may be null; None if no JSON is found."""
    found = fences(text)
    named = last_fence(found, lambda one: bool(_JSON.fullmatch(one.language)))
    content = last_fence(found, lambda one: not one.language) if named is None else named
    try:
        return (json.loads(text if content is None else content),)
    except (ValueError, RecursionError):
        return None
