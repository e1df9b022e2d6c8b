"""Secrets of a configuration: `env:NAME` refers to the value of the environment variable NAME where it is used.

`${env:NAME}` does so inside a longer text, such as an address. Only the reference is hashed, written and shown; the
value is read as late as possible, in the process that needs it, and is not part of a key.
"""

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from pydantic import BaseModel

from rlhf_core.errors import ConfigError, explain
from rlhf_core.secrets.redaction import (
    HIDDEN,
    REFERENCE,
    REFERENCE_INSIDE,
    hidden,
    is_plain_secret,
    is_secret_name,
    know,
)

M = TypeVar("M", bound=BaseModel)

REMEDY = "and set that variable where you start the run"


class HoldsSecrets:
    """Marks a field that may hold `env:NAME` references; plain-text secrets in it are rejected.

    A field whose name ends in `_env` holds the bare name of a variable.

    >>> arguments: Annotated[dict[str, Any], HOLDS_SECRETS] = {}                  # doctest: +SKIP
    """


HOLDS_SECRETS = HoldsSecrets()


# ---------------------------------------------------------------- reading


def resolved(value: Any, key: str) -> Any:
    """Resolve the references in `value`. Raises ConfigError for a variable that is not set.

    >>> resolved({"limit": 3, "path": "$HOME"}, "arguments")
    {'limit': 3, 'path': '$HOME'}
    """
    if isinstance(value, str):
        return _resolved_text(value, key)
    if isinstance(value, Mapping):
        return {name: resolved(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(resolved(item, f"{key}[{index}]") for index, item in enumerate(value))
    return value


def bearer(key: str, variable: str) -> dict[str, str]:
    """The header with the token in the environment variable, {} for "".

    Raises ConfigError if the variable is not set, or holds characters that no header can have, such as the carriage
    return of a file from Windows.
    """
    if not variable:
        return {}
    token = _read(variable, key, variable)
    if token != token.strip() or not (token.isascii() and token.isprintable()):
        rule = "begins or ends with white space, or holds what is no printable ASCII: no header can hold it"
        raise ConfigError(key, variable, rule, "set the variable to the token alone")
    return {"Authorization": f"Bearer {token}"}


def with_secrets(config: M, key: str) -> M:
    """Resolve the references in `config`, for the process that uses it. Never write the result."""
    return config.model_copy(
        update={
            name: resolved(getattr(config, name), f"{key}.{name}")
            for name in holding(type(config))
            if not name.endswith("_env")
        }
    )


def check(config: BaseModel, key: str) -> None:
    """Raise ConfigError if `config` refers to a variable that is not set. The values read are redacted from now on."""
    for name, value in config:
        if name in holding(type(config)):
            if name.endswith("_env"):
                bearer(f"{key}.{name}", value)
            else:
                resolved(value, f"{key}.{name}")
        for path, part in _parts(value, f"{key}.{name}"):
            check(part, path)


def holding(kind: type[BaseModel]) -> list[str]:
    """The names of the fields marked with `HOLDS_SECRETS`."""
    fields = kind.model_fields.items()
    return [name for name, field in fields if any(isinstance(mark, HoldsSecrets) for mark in field.metadata)]


def _resolved_text(text: str, key: str) -> str:
    whole = REFERENCE.fullmatch(text)
    if whole:
        return _read(whole[1], key, text)
    in_address = "://" in text

    def read(found: re.Match[str]) -> str:
        return _read(found[1], key, text, quoted=in_address)

    value = REFERENCE_INSIDE.sub(read, text)
    if in_address and value != text:
        _know_login(value)
    return value


def _know_login(address: str) -> None:
    """Redact user and password of an address also in the form in which HTTP sends them."""
    user, at, _ = address.partition("://")[2].partition("/")[0].rpartition("@")
    if at:
        name, _, password = map(unquote, user.partition(":"))
        know(base64.b64encode(f"{name}:{password}".encode()).decode())


def _read(variable: str, key: str, shown: str, *, quoted: bool = False) -> str:
    value = os.environ.get(variable, "")
    if not value:
        rule = "is not set" if shown == variable else f"{variable} is not set"
        remedy = "export it where you start the run; for ray-job, where you run `ray start`"
        raise ConfigError(key, shown, rule, remedy)
    know(value)
    return quote(value, safe="") if quoted else value


def _parts(value: Any, path: str) -> Iterator[tuple[str, BaseModel]]:
    if isinstance(value, BaseModel):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _parts(item, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _parts(item, f"{path}[{index}]")


# ---------------------------------------------------------------- refusing


def refuse_plain(name: str, value: Any, *, remedy: str = "") -> None:
    """Raise ConfigError if the field `name` holds a secret in clear, at any depth; the message does not repeat it."""
    for path, last, text in _texts(value, name, name):
        if name.endswith("_env"):
            if text and not re.fullmatch(r"[A-Za-z_]\w*", text):
                rule = "must be the name of an environment variable"
                raise ConfigError(
                    path, HIDDEN, rule, "put the secret into a variable, and give the name of that variable here"
                )
        elif is_plain_secret(last, text):
            raise ConfigError(_refused(path, last, text, remedy))


def refuse_plain_options(name: str, command: Sequence[str], *, remedy: str) -> None:
    """Raise ConfigError if a command has a secret among its options: `--api-key=...` or `--api-key ...`."""
    pairs = [(before.lstrip("-"), word) for before, word in pairwise(command) if before.startswith("--")]
    pairs += [(word.partition("=")[0].lstrip("-"), word.partition("=")[2]) for word in command if word.startswith("-")]
    for option, text in [*pairs, *(("", word) for word in command)]:
        if is_plain_secret(option, text) and not text.startswith("-"):
            raise ConfigError(_refused(name, option, text, remedy))


def _refused(path: str, name: str, text: str, remedy: str) -> str:
    variable = re.sub(r"\W+", "_", name).upper()
    whole = is_secret_name(name)
    write = f'write "env:{variable}"' if whole else 'write "${env:NAME}" in its place'
    rule = "is a secret in plain text, which keys, records and pages would show"
    return explain(path, HIDDEN if whole else hidden(name, text), rule, remedy or f"{write}, {REMEDY}")


def _texts(value: Any, path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield dotted path, last name and text of every string in `value`."""
    if isinstance(value, str):
        yield path, name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}", str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]", name)
