"""Flatten and shorten values for a tracking server. `rlhf_core.secrets.redaction` removes the secrets."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from rlhf_core.secrets.redaction import hidden

PARAM_CHARACTERS = 6000  # limit of MLflow
TAG_CHARACTERS = 8000  # limit of MLflow
KEY_CHARACTERS = 250  # limit of MLflow
_ODD = re.compile(r"[^\w\-. :/]")


def flatten(values: Mapping[str, Any] | BaseModel) -> dict[str, str]:
    """Flatten to dotted key -> text of every leaf, with secrets hidden and values cut to MLflow's limits.

    >>> flatten({"ppo": {"kl_coef": 0.05, "hf_token": "abc"}, "seed": 17})
    {'ppo.kl_coef': '0.05', 'ppo.hf_token': '***', 'seed': '17'}
    """
    plain = values.model_dump(mode="json") if isinstance(values, BaseModel) else values
    return {key[:KEY_CHARACTERS]: str(hidden(key, value))[:PARAM_CHARACTERS] for key, value in _leaves("", plain)}


def tags(values: Mapping[str, Any]) -> dict[str, str]:
    """Convert `values` to tags: text with secrets hidden, cut to MLflow's limits."""
    return {
        _ODD.sub("_", key)[:KEY_CHARACTERS]: str(hidden(key, value))[:TAG_CHARACTERS] for key, value in values.items()
    }


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping) and (value or not prefix):
        for name, item in value.items():
            part = _ODD.sub("_", str(name))
            yield from _leaves(f"{prefix}.{part}" if prefix else part, item)
    else:
        yield prefix, value
