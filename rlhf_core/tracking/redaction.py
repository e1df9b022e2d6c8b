"""What may be written to a tracking server: flat, short, and without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 8000
KEY_CHARACTERS = 250
HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(^|[_.-])(token|secret|password|passwd|api_?key|access_?key|private_?key|credentials?|authorization)$", re.I
)
_SPECIAL_TOKEN = re.compile(r"(^|[_.-])(bos|eos|pad|unk|sep|cls|mask|end|start|stop|image)_token$", re.I)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abpr]-[A-Za-z0-9-]{10,}|Bearer\s+[A-Za-z0-9._~+/=-]{16,})"
)
_URL_PASSWORD = re.compile(r"(\w+://)[^\s/@:]*:[^\s/@]+@")
_ODD = re.compile(r"[^\w\-. :/]")


def flatten(values: Mapping[str, Any] | BaseModel) -> dict[str, str]:
    """Return dotted key -> text of every leaf, secrets hidden, values cut to what MLflow takes.

    >>> flatten({"ppo": {"kl_coef": 0.05, "hf_token": "abc"}, "seed": 17})
    {'ppo.kl_coef': '0.05', 'ppo.hf_token': '***', 'seed': '17'}
    """
    plain = values.model_dump(mode="json") if isinstance(values, BaseModel) else values
    return {key[:KEY_CHARACTERS]: hidden(key, value)[:PARAM_CHARACTERS] for key, value in _leaves("", plain)}


def tags(values: Mapping[str, Any]) -> dict[str, str]:
    """Return `values` as tags: text, secrets hidden, cut to what MLflow takes."""
    return {_ODD.sub("_", key)[:KEY_CHARACTERS]: hidden(key, value)[:TAG_CHARACTERS] for key, value in values.items()}


def hidden(key: str, value: Any) -> str:
    """Return `value` as text; a value with the name of a secret, or the look of one, is hidden."""
    if isinstance(value, str) and value and _SECRET_NAME.search(key) and not _SPECIAL_TOKEN.search(key):
        return HIDDEN
    return without_secrets(str(value))


def without_secrets(text: str) -> str:
    """Return `text` without access tokens and without passwords in URLs.

    >>> without_secrets("postgresql://me:hunter2@db/mlflow")
    'postgresql://***@db/mlflow'
    """
    return _URL_PASSWORD.sub(rf"\1{HIDDEN}@", _SECRET_VALUE.sub(HIDDEN, text))


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping) and (value or not prefix):
        for name, item in value.items():
            part = _ODD.sub("_", str(name))
            yield from _leaves(f"{prefix}.{part}" if prefix else part, item)
    else:
        yield prefix, value
