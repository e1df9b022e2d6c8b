"""Write a profile as TOML."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_core.schema.base import PRESENT_NAMES
from rlhf_core.secrets.redaction import hidden

_BARE = re.compile(r"[\w-]+", re.ASCII)


def as_table(config: BaseModel) -> dict[str, Any]:
    """Convert a profile, or a section, to the table of a file: no empty keys, and only current names."""
    return config.model_dump(mode="json", exclude_none=True, by_alias=True, context=PRESENT_NAMES)


def as_toml(config: BaseModel) -> str:
    """The keys that a configuration was given, as a profile; secrets are hidden, and `[notify]` is left out."""
    table = _given(as_table(config), config)
    return "\n".join(_tables("", hidden("profile", {key: value for key, value in table.items() if key != "notify"})))


def toml_literal(value: Any) -> str:
    """Format a value for a profile or for `--set`.

    >>> toml_literal({"path": "a.jsonl", "use": [0.5, True]})
    '{path = "a.jsonl", use = [0.5, true]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {toml_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(toml_literal, value)) + "]"
    if isinstance(value, (str, Path)):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON allows it, TOML does not
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _given(table: Any, config: Any) -> Any:
    """The part of a configuration's table that differs from the defaults."""
    if isinstance(config, BaseModel):
        names = {field.alias or name: name for name, field in type(config).model_fields.items()}
        given = {key: names[key] for key in table if names[key] in config.model_fields_set}
        return {key: _given(table[key], getattr(config, name)) for key, name in given.items()}
    if isinstance(config, Mapping):
        return {key: _given(value, config[key]) for key, value in table.items()}
    if isinstance(config, (list, tuple)):
        return [_given(*pair) for pair in zip(table, config, strict=True)]
    return table


def _tables(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table: its own keys first, as TOML demands, then the tables inside."""
    inside = {key: value for key, value in table.items() if isinstance(value, Mapping) and value}
    own = [f"{_key(key)} = {toml_literal(value)}" for key, value in table.items() if key not in inside]
    if own:
        yield "\n".join([f"[{name}]"] * bool(name) + own) + "\n"
    for key, value in inside.items():
        yield from _tables(f"{name}.{_key(key)}" if name else _key(key), value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)
