"""Format the errors of a profile: *key = value: rule; remedy*."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlhf_core.config.former_names import FORMER
from rlhf_core.errors import ConfigError, nearest, of_its_side
from rlhf_core.schema.base import FIELD_OF, SPELLINGS, tag_of
from rlhf_core.secrets.redaction import hidden

_LONGEST_SHOWN = 500
"""Maximum number of characters of a value in an error."""

QUOTES = ("'", '"')
"""Begin the message of a rule that names the value that breaks it."""
_NAMES_KEY = re.compile(r"[^\s:]+( = |:|, )")
"""Begins the message of a rule that names a key of its table."""
_KIND = "Input should be "
_TABLE = r"a valid dictionary( or instance of \w+| or object to extract fields from)?"
_WORDS = {
    "Input should": "must",
    "(Tuple|List) should": "must",
    "a valid (tuple|list)": "a list",
    "a valid string": "text",
    r"at least (\d+) items? after validation, not (\d+)": r"\1 or more entries, and has \2",
    _TABLE: "a table",
}
"""Patterns of pydantic's words -> words of a profile."""
ANY = "NAME"
"""A key that the profile chooses."""


def first_error(error: ValidationError, tree: Mapping[str, Any], model: type[BaseModel], *, origin: str) -> str:
    """Error message for an invalid profile: its first unknown key, else the first key that breaks a rule.

    `tree` is the parsed profile, `model` the target type, `origin` the source of the profile.
    """
    errors = error.errors()
    unknown = [one for one in errors if one["type"] == "extra_forbidden"]
    first = (unknown or errors)[0]
    first = next((one for one in errors if _is_of_an_entry(one, first)), first)
    location, given = first["loc"], first["input"]
    tags = [given.get(tag) for tag in FIELD_OF] if isinstance(given, Mapping) else []
    if first["type"] == "value_error" and location and location[-1] in tags:
        location = location[:-1]  # the rule is about a whole table, and this is the tag of its union
    keys = _real_keys(location, tree, model, given)
    dotted = ".".join(keys)
    if first["type"] == "extra_forbidden":
        tag, others = _types_with(keys, model, location)
        if others and len(location) > len(keys):  # pydantic puts the chosen type between table and key
            return _key_of_another_type(keys, location[-2], first["input"], others, tag)
        near = _nearest(keys, model, tree)
        remedy = f"did you mean {near}?" if near not in ("", dotted) else "remove it"
        return f"{dotted} = {shown_value(keys[-1], first['input'])}: unknown key; {remedy}"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        tag = re.findall(r"'(\w+)'", str(first["ctx"]["discriminator"]))[-1]  # the alias, if the field has one
        return _unknown_type(keys, given, tag, model)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        if not dotted:
            return message
        # A rule of one key leaves its value to us.
        if message.startswith("must ") and not isinstance(given, Mapping):
            return f"{dotted} = {shown_value(keys[-1], given)}: {message}"
        named = "." if _NAMES_KEY.match(message) else ": "
        return f"{dotted}{' = ' if message.startswith(QUOTES) else named}{message}"
    if first["type"] == "missing":
        return f"{dotted}: missing, and it has no default; add it to {origin}"
    if location[-1:] == ("[key]",):
        rule = "a name has letters, digits, _ and -, and begins with a letter or digit"
        return f"{'.'.join(keys[:-1])} = {{...}}: {rule}; give it another one"
    value = first["input"]
    rule = _rule(error, location) if len(keys) < len(location) else message
    for theirs, ours in _WORDS.items():
        rule = re.sub(theirs, ours, rule)
    is_long = isinstance(value, Mapping) or (isinstance(value, list) and any(map(_holds_others, value)))
    shown = "{...}" if is_long else shown_value(keys[-1] if keys else "", value)
    remedy = f"change it in {origin} or with --set {dotted}=..."
    if first["type"] == "literal_error":
        near = nearest(str(value), re.findall("'([^']+)'", first["ctx"]["expected"]))
        remedy = near if near.startswith("did you mean") else remedy
    return f"{dotted} = {shown}: {rule[0].lower()}{rule[1:]}; {remedy}"


def _is_of_an_entry(one: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether an error is about an entry of the list that `whole` is about.

    Such an error says more than the error that the list is wrong.
    """
    given, at = whole["input"], one["loc"][-1] if one["loc"] else None
    if not isinstance(given, list) or not isinstance(at, int) or one["loc"][:-2] != whole["loc"][:-1]:
        return False
    return at < len(given) and given[at] is one["input"]


def _holds_others(value: object) -> bool:
    return isinstance(value, (Mapping, list))


def _rule(error: ValidationError, location: Sequence[int | str]) -> str:
    """The rule of an option with several kinds of values: the rule of the given kind, else the rules of all kinds."""
    rules = [one["msg"] for one in error.errors() if one["loc"][:-1] == location[:-1]]
    of_kind = [rule for rule in rules if not rule.startswith(_KIND)]
    return of_kind[0] if of_kind else _KIND + " or ".join(dict.fromkeys(rule.removeprefix(_KIND) for rule in rules))


def check_removal(keys: Sequence[str], table: Mapping[Any, Any], model: type[BaseModel]) -> None:
    """Raise ConfigError unless the last of `keys`, which `table` does not have, is the name of an option.

    Any other name is misspelt, and the intended key would stay.
    """
    if any(_is_name(keys, name) for name in _names(model)):
        return
    near = difflib.get_close_matches(keys[-1], sorted(map(str, table)), n=1, cutoff=0.6)
    meant = ".".join([*keys[:-1], near[0]]) if near else _nearest(keys, model, {})
    remedy = f"did you mean {meant}?" if meant else "remove it"
    raise ConfigError(f"{'.'.join(keys)} = 'none': there is nothing of this name to remove; {remedy}")


def shown_value(key: str, value: Any) -> str:
    """Format a profile's value for an error message: without secrets, and shortened to a paragraph."""
    try:
        text = repr(hidden(key, value))
    except RecursionError:  # a dotted key may nest tables arbitrarily deep
        return "{...}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]} ..."


def _unknown_type(keys: Sequence[str], given: Any, tag: str, model: type[BaseModel]) -> str:
    """The error for a table whose `tag`, such as `type`, is unknown or missing; it lists the possible types."""
    found = dict.fromkeys(name for one in models_at(keys, model) for name in _values_of(one, tag, given))
    dotted = ".".join([*keys, tag])
    if tag not in given:
        return f"{dotted}: missing, and it has no default; choose one of {', '.join(found)}"
    kind = "stage" if tag == "stage" else "type"
    return (
        f"{dotted} = {shown_value(tag, given[tag])}: there is no such {kind}; {nearest(str(given[tag]), list(found))}"
    )


def _values_of(model: type[BaseModel], tag: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of `tag` in a model, () if `given` has chosen another model by another tag."""
    fields = fields_of(model)
    for other in FIELD_OF:
        if other != tag and other in fields and given.get(other) not in (None, *get_args(fields[other].annotation)):
            return ()
    return get_args(fields[tag].annotation) if tag in fields else ()


def _key_of_another_type(keys: Sequence[str], chosen: int | str, value: Any, others: Sequence[str], tag: str) -> str:
    """The error for a key that `others`, types of the same table, have and the `chosen` one has not."""
    dotted, table = ".".join(keys), ".".join(keys[:-1])
    named = " and ".join(filter(None, [", ".join(map(repr, others[:-1])), repr(others[-1])]))
    rule = f"is not an option of type {chosen!r} but of {named}"
    remedy = f"remove it, for example with --set {dotted}=none, or replace the whole table: --set {table}="
    whole = f"'{{{tag} = \"{others[0]}\", {keys[-1]} = ...}}'"
    return f"{dotted} = {shown_value(keys[-1], value)}: {rule}; {remedy}{whole}"


def _types_with(keys: Sequence[str], model: type[BaseModel], location: Sequence[int | str]) -> tuple[str, list[str]]:
    """The types at the place of `keys[:-1]` that have the key `keys[-1]`, and the tag that selects them.

    The table of a step is compared with the types of its stage, which `location` names.
    """
    models = [one for one in models_at(keys[:-1], model) if keys[-1] in fields_of(one)]
    found = [tag_of(one) for one in models]
    if any(tag == "stage" for tag, _ in found):
        of_stage = [(one, names[0]) for one, (_, names) in zip(models, found, strict=True) if names[0] in location]
        found = [(f'stage = "{name}", type', get_args(fields_of(one)["type"].annotation)) for one, name in of_stage]
    return max((tag for tag, _ in found), default=""), sorted({name for _, names in found for name in names})


def models_at(keys: Sequence[str], model: type[BaseModel], tree: Any = None) -> list[type[BaseModel]]:
    """The possible models at the place of `keys`; with a profile `tree`, only the models that its tables choose."""
    models, is_named, in_list = [model], False, False
    for key in keys:
        known = [fields_of(one) for one in models]
        tree = tree.get(key) if isinstance(tree, Mapping) else None
        # A place or a name in a list, or a name in a table, whose models were found with it.
        if key.isdigit() or is_named or (in_list and not any(key in fields for fields in known)):
            is_named = in_list = False
        else:
            fields = [one[key].annotation for one in known if key in one]
            models = [found for annotation in fields for found in _models_in(annotation)]
            is_named = any(get_origin(annotation) is dict for annotation in fields)
            in_list = any(get_origin(annotation) is tuple for annotation in fields)
        if isinstance(tree, Mapping):
            models = [one for one in models if _is_chosen(one, tree)] or models
    return models


def _is_chosen(model: type[BaseModel], table: Mapping[str, Any]) -> bool:
    """True unless a key of the table, such as `stage` or `type`, chooses another model."""
    fields = fields_of(model)
    tags = [tag for tag in FIELD_OF if tag in table and tag in fields and get_origin(fields[tag].annotation) is Literal]
    return all(table[tag] in get_args(fields[tag].annotation) for tag in tags)


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _real_keys(location: Sequence[int | str], tree: Any, model: type[BaseModel], given: Any) -> list[str]:
    """The keys of `location` that are in the file, for an error about the value `given`.

    Pydantic adds the tag of each union behind the union's key, and the kind of value that the union takes.
    """
    keys: list[str] = []
    is_behind_tag = False
    for position, key in enumerate(location):
        # A name that the profile chooses, as in [recipe.sft], may also be the name of a type.
        owners = [fields_of(one) for one in models_at(keys[:-1], model)] if keys else []
        is_name = any(get_origin(one[keys[-1]].annotation) is dict for one in owners if keys[-1] in one)
        tags = [] if is_behind_tag or is_name else [name for one in models_at(keys, model) for name in tag_of(one)[1]]
        is_behind_tag = key in tags and position > 0 and len(tags) > 1
        if is_behind_tag:
            continue
        if isinstance(tree, Mapping) and key in tree:
            tree = tree[key]
        elif isinstance(tree, (list, tuple)) and isinstance(key, int):
            tree = tree[key] if key < len(tree) else None
        elif position < len(location) - 1 or not isinstance(tree, Mapping) or ("[" in str(key) and given == tree):
            continue
        keys.append(str(key))
    return keys


def _nearest(keys: Sequence[str], model: type[BaseModel], tree: Mapping[str, Any]) -> str:
    """The option that a misspelled key probably means: in its table, below it, or elsewhere; "" for none.

    A table that chooses its type, such as a step its stage, is compared with the options of this type only.
    """
    models = models_at(keys[:-1], model, tree)
    here = [fields_of(one) for one in models]
    beside = {name: (name,) for fields in here for name in fields}
    former = {name: path for name, path in FORMER.items() if any(path[0] in fields for fields in here)}
    spelled = {name: (present,) for name, present in SPELLINGS.items() if present in beside}
    near = difflib.get_close_matches(
        keys[-1], of_its_side(keys[-1], sorted(former | spelled | beside)), n=1, cutoff=0.6
    )
    if near:
        return ".".join([*keys[:-1], *(former | spelled | beside)[near[0]]])
    section = tuple(keys[:-1])
    below = {name[-1]: (*section, *name) for one in models for name in _names(one) if len(name) > 1 and ANY not in name}
    inside = (
        difflib.get_close_matches(keys[-1], of_its_side(keys[-1], sorted(below)), n=1, cutoff=0.7) if section else []
    )
    if inside or any(tag_of(one)[0] for one in models):
        return ".".join(below[inside[0]]) if inside else ""
    known = {_with_names(name, keys) for name in _names(model)}
    found = {name for name in known if name[: len(section)] != section} | {
        (*section, *name) for name in beside.values()
    }
    others = sorted(".".join(name) for name in {*found, *below.values()} if ANY not in name)
    return "".join(difflib.get_close_matches(".".join(keys), of_its_side(keys[-1], others), n=1, cutoff=0.6))


def _with_names(name: Sequence[str], keys: Sequence[str]) -> tuple[str, ...]:
    """An option with the names that `keys` have in place of `ANY`, if it has as many parts."""
    return (
        tuple(key if part == ANY else part for part, key in zip(name, keys, strict=True))
        if len(name) == len(keys) and all(part in (key, ANY) for part, key in zip(name[:-1], keys, strict=False))
        else tuple(name)
    )


def _is_name(keys: Sequence[str], name: Sequence[str]) -> bool:
    return len(keys) == len(name) and all(part in (key, ANY) for key, part in zip(keys, name, strict=True))


def _names(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys of every option, with `ANY` for the names in a table, and the places in a list, of models."""
    for name, field in fields_of(model).items():
        yield (*above, name)
        named = (ANY,) if get_origin(field.annotation) in (dict, tuple) else ()
        for inner in _models_in(field.annotation):
            yield from _names(inner, (*above, name, *named))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
