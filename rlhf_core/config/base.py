"""The base of every configuration class, and the mark that keeps a field out of a stage's key."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Operational:
    """Marks a field that changes how a stage runs but not what it computes: `workers: Annotated[int, OPERATIONAL] = 1`."""


OPERATIONAL = Operational()


class Config(BaseModel):
    """Frozen; unknown keys are refused; every default exists once, here on a field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)


def by_type(value: Any) -> Any:
    """Return the table that a bare name stands for: `loss = "ipo"` reads as `loss = {type = "ipo"}`.

    >>> by_type("ipo")
    {'type': 'ipo'}
    """
    return {"type": value} if isinstance(value, str) else value


def keyed(config: BaseModel) -> dict[str, Any]:
    """Return the JSON-able fields that belong to the key of a stage: all but those marked `OPERATIONAL`, recursively."""
    return {
        name: _keyed_value(getattr(config, name))
        for name, field in type(config).model_fields.items()
        if not any(isinstance(mark, Operational) for mark in field.metadata)
    }


def _keyed_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return keyed(value)
    if isinstance(value, (list, tuple)):
        return [_keyed_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _keyed_value(item) for key, item in value.items()}
    return value
