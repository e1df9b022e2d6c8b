"""Format errors in a profile: *key = value: rule; remedy*."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rlhf_core.errors import ConfigError
from rlhf_core.secrets.redaction import hidden

_LONGEST_SHOWN = 500
"""Maximum number of characters of a value in an error."""

QUOTES = ("'", '"')
"""Begin the message of a rule that names the value that breaks it."""
ANY = "NAME"
"""A key that the profile chooses."""


def first_error(error: ValidationError, tree: Mapping[str, Any], model: type[BaseModel], *, origin: str) -> str:
    """Return the error message for an invalid profile: its first unknown key, else the first key that breaks a rule.

    `tree` is the parsed profile, `model` the target type, `origin` the source of the profile.
    """
    unknown = [one for one in error.errors() if one["type"] == "extra_forbidden"]
    first = (unknown or error.errors())[0]
    location, given = first["loc"], first["input"]
    if first["type"] == "value_error" and isinstance(given, Mapping) and location and location[-1] == given.get("type"):
        location = location[:-1]  # the rule is about a whole table, and this is the tag of its union
    keys = _real_keys(location, tree)
    dotted = ".".join(keys)
    if first["type"] == "extra_forbidden":
        others = _types_with(keys, model)
        if others and len(location) > len(keys):  # pydantic puts the chosen type between table and key
            return _of_another_type(keys, location[-2], first["input"], others)
        near = _nearest(keys, model)
        remedy = f"did you mean {near}?" if near not in ("", dotted) else "remove it"
        return f"{dotted} = {shown_value(keys[-1], first['input'])}: unknown key; {remedy}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        if not dotted:
            return message
        # A rule of one key leaves its value to us.
        if message.startswith("must ") and not isinstance(given, Mapping):
            return f"{dotted} = {shown_value(keys[-1], given)}: {message}"
        return f"{dotted}{' = ' if message.startswith(QUOTES) else '.'}{message}"
    if first["type"] == "missing":
        return f"{dotted}: missing, and it has no default; add it to {origin}"
    rule = message.replace("Input should be", "must be")
    value = first["input"]
    shown = shown_value(keys[-1] if keys else "", value) if not isinstance(value, (Mapping, list)) else "{...}"
    return f"{dotted} = {shown}: {rule[0].lower()}{rule[1:]}; change it in {origin} or with --set {dotted}=..."


def check_removal(keys: Sequence[str], table: Mapping[Any, Any], model: type[BaseModel]) -> None:
    """Raise ConfigError unless the last of `keys`, which `table` does not have, is the name of an option.

    Any other name is misspelt: what it should remove would stay.
    """
    if any(_is_name(keys, name) for name in _names(model)):
        return
    near = difflib.get_close_matches(keys[-1], sorted(map(str, table)), n=1, cutoff=0.6)
    meant = ".".join([*keys[:-1], near[0]]) if near else _nearest(keys, model)
    remedy = f"did you mean {meant}?" if meant else "remove it"
    raise ConfigError(f"{'.'.join(keys)} = 'none': there is nothing of this name to take away; {remedy}")


def shown_value(key: str, value: Any) -> str:
    """Return a profile's value for an error message: without secrets, and shortened to a paragraph."""
    try:
        text = repr(hidden(key, value))
    except RecursionError:  # a dotted key may nest tables arbitrarily deep
        return "{...}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


def _of_another_type(keys: Sequence[str], chosen: int | str, value: Any, others: Sequence[str]) -> str:
    """Return the error for a key that `others`, types of the same table, have and the `chosen` one has not."""
    dotted, table = ".".join(keys), ".".join(keys[:-1])
    named = " and ".join(filter(None, [", ".join(map(repr, others[:-1])), repr(others[-1])]))
    rule = f"is not an option of type {chosen!r} but of {named}"
    remove, replace = "remove it", f'choose type = "{others[0]}" for the whole table {table}'
    if not any(key.isdigit() for key in keys):  # --set reaches no place in a list
        remove += f", for example with --set {dotted}=none"
        replace = f"replace the whole table: --set {table}='{{type = \"{others[0]}\", {keys[-1]} = ...}}'"
    return f"{dotted} = {shown_value(keys[-1], value)}: {rule}; {remove}, or {replace}"


def _types_with(keys: Sequence[str], model: type[BaseModel]) -> list[str]:
    """Return the `type` of each model that can stand at the place of `keys` without the last, and has this last key."""
    models = [model]
    for key in keys[:-1]:
        if not key.isdigit():  # a place in a list, whose models were found with the list
            fields = [one.model_fields[key].annotation for one in models if key in one.model_fields]
            models = [found for annotation in fields for found in _models_in(annotation)]
    found = [one.model_fields for one in models if keys[-1] in one.model_fields and "type" in one.model_fields]
    return sorted({str(name) for fields in found for name in get_args(fields["type"].annotation)})


def _real_keys(location: Sequence[int | str], tree: Any) -> list[str]:
    """Return the keys of `location` that are in the file: pydantic adds the tag of the union that it chose."""
    keys = []
    for position, key in enumerate(location):
        if isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
        elif isinstance(tree, (list, tuple)) and isinstance(key, int):
            tree = tree[key] if key < len(tree) else None
        elif position < len(location) - 1 or not isinstance(tree, Mapping):
            continue
        keys.append(str(key))
    return keys


def _nearest(keys: Sequence[str], model: type[BaseModel]) -> str:
    known = {
        tuple(key if part == ANY else part for part, key in zip(name, (*keys, *name[len(keys) :]), strict=False))
        for name in _names(model)
    }
    last = {name[-1]: ".".join(name) for name in sorted(known) if name[:-1] == tuple(keys[:-1])}
    near = difflib.get_close_matches(keys[-1], last, n=1, cutoff=0.6)
    if near:
        return last[near[0]]
    anywhere = difflib.get_close_matches(".".join(keys), sorted(map(".".join, known)), n=1, cutoff=0.6)
    return anywhere[0] if anywhere else ""


def _is_name(keys: Sequence[str], name: Sequence[str]) -> bool:
    return len(keys) == len(name) and all(part in (key, ANY) for key, part in zip(keys, name, strict=True))


def _names(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys of every option, with `ANY` for the names in a table of models."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        named = (ANY,) if get_origin(field.annotation) is dict else ()
        for inner in _models_in(field.annotation):
            yield from _names(inner, (*above, name, *named))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
