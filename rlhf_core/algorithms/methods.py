"""Finds methods: one file in the folder of a family is enough for a method to be chosen by its `type`."""

import importlib
import operator
import pkgutil
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field

from rlhf_core.schema.base import Config, by_type

M = TypeVar("M", bound=Config)


def methods_in(package: str, path: Iterable[str], family: type[M], *, first: Sequence[str]) -> tuple[type[M], ...]:
    """Find the classes of `family` with a `type` that the modules of `package`, which lie in `path`, define.

    Forms and error messages list them in this order: the types in `first`, then all others by name. Call it with the
    package's own `__path__`: `rlhf_core.store.fingerprint` takes that as the import of all modules in that folder.
    """
    found: dict[str, type[M]] = {}
    files = (entry for entry in pkgutil.iter_modules(path) if not entry.ispkg)
    for module in sorted(f"{package}.{entry.name}" for entry in files):
        for kind in vars(importlib.import_module(module)).values():
            if isinstance(kind, type) and issubclass(kind, family) and kind.__module__ == module:
                field = kind.model_fields.get("type")
                if field is not None:
                    found[field.default] = kind
    order = {name: place for place, name in enumerate(first)}
    return tuple(found[name] for name in sorted(found, key=lambda name: (order.get(name, len(order)), name)))


def one_of(methods: Sequence[type[Config]]) -> Any:
    """The annotation of a field with one of `methods`, selected by `type`; a bare name stands for its table.

    >>> from pydantic import TypeAdapter
    >>> from rlhf_core.algorithms import policy
    >>> TypeAdapter(one_of(policy.METHODS)).validate_python("cispo").clip_high
    4.0
    """
    return Annotated[reduce(operator.or_, methods), Field(discriminator="type"), BeforeValidator(by_type)]  # type: ignore[arg-type]
