"""The base class of every configuration, and the marks that keep a field out of a stage's key."""

import ast
import inspect
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeAlias, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from rlhf_core.schema.hosts import is_server
from rlhf_core.schema.secrets import holding, refuse_plain
from rlhf_core.secrets.redaction import hidden


class Operational:
    """Marks a field that changes how a stage runs but not its result, except by rounding.

    >>> workers: Annotated[int, OPERATIONAL] = 1                                  # doctest: +SKIP
    """


class FailureSetting(Operational):
    """Marks an operational field that decides whether an answer fails, or the treatment of a failed answer.

    It does not enter the key, but a result with failed answers counts only for these settings
    (`rlhf_core.stage.failures`).
    """


BESIDE = "/./"
"""Separator between the folder of a profile and a path that is written in it."""


def as_written(text: str) -> str:
    """A path as written in its profile, without the profile's folder; other texts stay unchanged.

    >>> as_written("/home/me/team/./rewards/brief.py:brief")
    'rewards/brief.py:brief'
    """
    folder, separator, path = text.partition(BESIDE)
    return path if separator and not any(map(str.isspace, folder)) else text


SPELLINGS = {"licence": "license", "normalise": "normalize", "quantise": "quantize"}
"""Former spelling of a key -> the present one. Both are read; results are recorded under the former, and so keep their keys."""
OTHER_SPELLING = SPELLINGS | {key: former for former, key in SPELLINGS.items()}

OPERATIONAL = Operational()
FAILURES = FailureSetting()


def _function(spec: str) -> str:
    module, separator, name = spec.rpartition(":")
    if not separator or not module or not name.isidentifier():
        raise ValueError("must read package.module:function or path/to/file.py:function; add what is missing")
    return spec


def http_address(url: str) -> str:
    """The URL of a server, unchanged. Raises ValueError if no client can use it."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{hidden('url', url)!r}: must begin with http:// or https://; give the complete URL")
    try:
        place = urlsplit(url).netloc.rpartition("@")[2]
        found = is_server(place) and url.isprintable() and " " not in url
    except ValueError:  # as of http://[::1
        found = False
    if not found:
        raise ValueError(f"{hidden('url', url)!r}: has no host, or an invalid port; write it as http://host:port/path")
    return url


FunctionName: TypeAlias = Annotated[str, AfterValidator(_function)]
"""A function or class of the user."""
HttpAddress: TypeAlias = Annotated[str, AfterValidator(http_address)]
"""The URL of a server."""
LONGEST_S = 2_000_000
"""The longest timeout in seconds, 23 days: with a grace period added, its milliseconds fit into 31 bits, as poll() needs."""
Seconds: TypeAlias = Annotated[float, Field(gt=0, le=LONGEST_S)]
"""A timeout."""


NUMERAL = re.compile(r"\s*[+-]?(\d[\d_]*\.?\d*(e[+-]?\d+)?|\.\d+|inf(inity)?|nan)\s*", re.IGNORECASE)
"""Text that pydantic would read as a number."""


class Config(BaseModel):
    """A frozen configuration table that refuses unknown keys and secrets in clear; defaults are set only on its fields.

    The text below a field becomes its description in the JSON schema, from which forms are built. It is read when a
    schema is requested and not when the class is created (`use_attribute_docstrings`), because parsing the sources of
    all configurations takes longer than planning a run.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        defer_build=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _name_default_types(cls, table: Any) -> Any:
        """Name the default's type in tables that name none: `[ppo.loss] clip_low = 0.1` is an option of `clip`."""
        if not isinstance(table, Mapping):
            return table
        for key, kind in _of_numbers(cls).items():
            if key in table:
                _check_kind(key, table[key], kind)
        tags = {key: tag for key, tag in _default_tags(cls).items() if isinstance(table.get(key), Mapping)}
        return {**table, **{key: tag | dict(table[key]) for key, tag in tags.items()}}

    @model_validator(mode="before")
    @classmethod
    def _read_former_spellings(cls, table: Any) -> Any:
        # Defined last, and so the first to run.
        if not isinstance(table, Mapping) or SPELLINGS.keys().isdisjoint(table):
            return table
        present = {former: key for former, key in SPELLINGS.items() if key in cls.model_fields and former in table}
        for former in [one for one, key in present.items() if key in table]:
            rule = f"is the former spelling of {present[former]}, which is set, too"
            raise ValueError(f"{former} = {table[former]!r}: {rule}; remove {former}")
        return {present.get(name, name): value for name, value in table.items()}

    @model_validator(mode="after")
    def _check_plain_secrets(self) -> Self:
        for name in holding(type(self)):
            refuse_plain(name, getattr(self, name))
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in _field_texts(cls).items():
            properties[cls.model_fields[name].alias or name].setdefault("description", text)
        for name, field in cls.model_fields.items():
            if isinstance(field.default, (Config, Mapping)) and "default" in (own := properties[field.alias or name]):
                own["default"] = _ANY.dump_python(field.default, mode="json", by_alias=True, context=PRESENT_NAMES)
        return schema

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        """JSON Schema of a configuration.

        Validators are built at their first use, and pydantic omits the discriminator of a union whose members were not
        built before it. So all are built twice, and again when there are new ones.
        """
        kinds = set(_subclasses(Config))
        if not kinds <= _BUILT:
            for force in (False, True):
                for kind in kinds:
                    kind.model_rebuild(force=force)
            _BUILT.update(kinds)
        return super().model_json_schema(*arguments, **options)


_BUILT: set[type[Config]] = set()
"""Tables whose validators are ready for a schema."""


def _subclasses(kind: type[Config]) -> Iterator[type[Config]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


class RenamedConfig(Config):
    """A configuration with former names or spellings of keys. Dumps, and so records and keys, have the former ones."""

    def recorded(self, table: dict[str, Any]) -> dict[str, Any]:
        """The fields of this table under the names with which results were recorded."""
        return {OTHER_SPELLING.get(name, name): value for name, value in table.items()}

    @model_serializer(mode="wrap")
    def _serialize(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        table: dict[str, Any] = handler(self)
        if info.context is not PRESENT_NAMES:
            table = self.recorded(table)
        return {name: one for name, one in table.items() if one is not None} if info.exclude_none else table


PRESENT_NAMES = object()
"""Context of a dump whose keys have their present names."""
_ANY: TypeAdapter[Any] = TypeAdapter(Any)
FIELD_OF = {"stage": "stage", "type": "type", "in": "in_"}
"""Keys that choose among the types of a table, and their fields: `in` is no name in Python."""


def tag_of(model: type[BaseModel]) -> tuple[str, tuple[str, ...]]:
    """The key by which a table of this type is chosen, and its values; ("", ()) if it stands alone.

    >>> from rlhf_core.algorithms.policy.clip import ClipLoss
    >>> tag_of(ClipLoss), tag_of(CustomFunction)
    (('type', ('clip',)), ('', ()))
    """
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key in FIELD_OF:
        if key in fields and get_origin(fields[key].annotation) is Literal:
            return key, get_args(fields[key].annotation)
    return "", ()


@lru_cache(maxsize=512)
def _of_numbers(model: type[BaseModel]) -> dict[str, Any]:
    """The annotations of the keys of a model that may hold numbers or switches, alone, in lists or in tables."""
    kinds = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    return {
        key: kind
        for key, kind in kinds.items()
        if any({int, float, bool, Any} & {*_kinds(one)} for one in _nested(kind))
    }


def _check_kind(key: str, value: Any, *kinds: Any) -> None:
    """Raise ValueError for infinity, for text in place of a number or switch, and for numbers and switches swapped.

    pydantic would convert them: true to 1, "5" to 5, and "no" to false.
    """
    if isinstance(value, (Mapping, list, tuple)):
        inner = [item for kind in kinds for item in _items(kind)]
        named = isinstance(value, Mapping)
        for name, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            _check_kind(f"{key}.{name}" if named else f"{key}[{name}]", one, *inner)
        return
    alone = {one for kind in kinds for one in _kinds(kind)}
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    if alone & {int, float} and isinstance(value, bool) and bool not in alone:
        raise ValueError(f"{key} = {shown}: must be a number; write 1 or 0 if it is meant")
    if alone & {int, float} and isinstance(value, str) and str not in alone and NUMERAL.fullmatch(value):
        raise ValueError(f"{key} = {shown}: is text, and must be a number; write {_number(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{key} = {shown}: must be finite; give a finite number")
    if alone and alone <= {bool, NoneType} and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        raise ValueError(f"{key} = {shown}: must be true or false; write one of them")


def _number(text: str) -> str:
    """Format a number as in TOML.

    >>> _number("007"), _number("1.E-3"), _number("Infinity")
    ('7', '0.001', 'a finite one')
    """
    number = float(text.replace("_", ""))
    return f"{int(number)}" if number.is_integer() else f"{number}" if math.isfinite(number) else "a finite one"


def _nested(kind: Any) -> Iterator[Any]:
    yield kind
    for inner in _items(kind):
        yield from _nested(inner)


def _items(kind: Any) -> list[Any]:
    """The annotations of the items of lists and of the values of tables that an annotation allows."""
    found = [one for one in _kinds(kind) if get_origin(one) in (tuple, list, dict)]
    return [inner for one in found for inner in get_args(one)[get_origin(one) is dict :] if inner is not ...]


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, without their marks."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(one for part in get_args(kind) for one in _kinds(part))
    return (kind,)


@lru_cache(maxsize=512)
def _default_tags(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """For each field whose default is one of several types, the key and the value that choose this type."""
    defaults = {field.alias or name: field.default for name, field in model.model_fields.items()}
    tags = {key: (tag_of(type(one))[0], one) for key, one in defaults.items() if isinstance(one, Config)}
    return {key: {tag: getattr(one, FIELD_OF[tag])} for key, (tag, one) in tags.items() if tag}


@lru_cache(maxsize=512)
def _field_texts(model: type[BaseModel]) -> dict[str, str]:
    """The text below each field in its class, or in the parent class that defines it."""
    texts: dict[str, str] = {}
    for parent in reversed(model.__mro__):
        if issubclass(parent, Config) and parent.__annotations__:
            body = ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]
            texts |= dict.fromkeys(parent.__annotations__, "") | _texts_below(body)
    return {name: texts[name] for name in model.model_fields if texts.get(name)}


def _texts_below(body: ast.stmt) -> dict[str, str]:
    statements = body.body if isinstance(body, ast.ClassDef) else []
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(statements)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def added_option(default: Any, **constraints: Any) -> Any:
    """Define a field that was added after results were stored: at its default it is in neither the JSON nor the key.

    Results that were made before the option existed keep their keys.

    >>> min_margin: float = added_option(0.0, ge=0)                              # doctest: +SKIP
    """
    return Field(default, exclude_if=lambda value: bool(value == default), **constraints)


def by_type(value: Any) -> Any:
    """Expand a bare name to its table: `loss = "ipo"` is read as `loss = {type = "ipo"}`.

    >>> by_type("ipo")
    {'type': 'ipo'}
    """
    return {"type": value} if isinstance(value, str) else value


def keyed(config: BaseModel) -> dict[str, Any]:
    """The JSON-serializable fields in a stage's key, recursively.

    Fields marked `OPERATIONAL` are left out, and options that were added later (`added_option`) at their defaults.
    """
    table = {
        name: _keyed_value(value)
        for name, field in type(config).model_fields.items()
        for value in [getattr(config, name)]
        if not any(isinstance(mark, Operational) for mark in field.metadata)
        and not (field.exclude_if is not None and field.exclude_if(value))
    }
    return config.recorded(table) if isinstance(config, RenamedConfig) else table


def _keyed_value(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return keyed(value)
    if isinstance(value, (list, tuple)):
        return [_keyed_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _keyed_value(item) for key, item in value.items()}
    return as_written(value) if isinstance(value, str) else value


# ---------------------------------------------------------------- custom


class CustomFunction(Config):
    """A user's function and its keyword arguments."""

    function: str = Field(pattern=r".:\w+$")
    """`file.py:name` or `module:name`. Its code, and every module of yours that it imports, is part of the stage's key."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
