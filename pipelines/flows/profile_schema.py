"""Make the JSON Schema by which editors complete a profile; only `load_profile` validates a profile."""

from collections.abc import Mapping
from typing import Any

from pipelines.flows.profile import PipelineConfig

DIALECT = "http://json-schema.org/draft-07/schema#"
"""Dialect that editors' TOML extensions read (Taplo, Even Better TOML); `$defs` is resolved there as any other path."""
EXTENDS = {
    "type": "string",
    "description": "Profile that this one is laid over: a path relative to this file, or a shipped one such as tiny/full.",
}
ENTRIES = {"type": "object", "description": "Changes to entries of the extended profile's list, by their names."}


def profile_schema() -> dict[str, Any]:
    """The JSON Schema of a profile file: the keys of `PipelineConfig`, in the forms that a file may have.

    A file that extends another one needs no key, removes one with `"none"`, and changes entries of a list by their names; a
    table may be the bare name of its type.

    >>> sorted(profile_schema()["properties"])[:4]
    ['budget', 'conditional_sft', 'deployments', 'distill']
    """
    schema: dict[str, Any] = _as_written(PipelineConfig.model_json_schema())
    schema["properties"] = {"extends": EXTENDS} | schema["properties"]
    return {"$schema": DIALECT, "title": "Profile of rlhf-lifecycle"} | schema


def _as_written(schema: Any) -> Any:
    """Adapt a schema to files: no required keys, and alternatives that a file may write in place of a value."""
    if isinstance(schema, list):
        return [_as_written(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    written: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("required", "discriminator", "title"):
            continue
        if key == "properties":
            written[key] = {name: _or_removed(field) for name, field in value.items()}
        elif key == "additionalProperties" and isinstance(value, Mapping):
            written[key] = _or_removed(value)
        elif key == "anyOf":  # TOML has no null
            written[key] = [_as_written(one) for one in value if one != {"type": "null"}]
        elif key == "default":
            written[key] = value
        else:
            # Without its `type`, a table can be of several types: it has the default's.
            written["anyOf" if key == "oneOf" else key] = _as_written(value)
    return written


def _or_removed(field: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a key's value, or "none", or the changes to a list of tables, or the name of a type."""
    described = {key: field[key] for key in ("description", "default") if field.get(key) is not None}
    value = _as_written({key: one for key, one in field.items() if key not in described})
    others: list[dict[str, Any]] = [{"const": "none"}]
    if "discriminator" in field:
        others.append({"enum": sorted(field["discriminator"]["mapping"])})
    if "items" in field and "$ref" in field["items"]:
        others.append(ENTRIES)
    return described | {"anyOf": [value, *others]}
