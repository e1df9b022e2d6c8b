"""Import objects that a profile names by path: `package.module:NAME`."""

import os
import re
import sys
from importlib import import_module
from typing import Any, TypeGuard

PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""The path of a class or a declaration. A file (`my/file.py:name`) is none: other processes could not import its classes."""


def is_path(name: object) -> TypeGuard[str]:
    """True for a path, False for the name of a built-in stage, sampler or executor.

    >>> is_path("my_team.samplers:Echo"), is_path("vllm"), is_path("a.b:c d")
    (True, False, False)
    """
    return isinstance(name, str) and PATH.fullmatch(name) is not None


def named(path: str) -> Any:
    """The object of this path. Raises ValueError, with the remedy, if it cannot be imported.

    The working folder is searched last. It stays on `sys.path`, which worker processes take over.
    """
    module, _, name = path.partition(":")
    here = str(os.getcwd())  # noqa: PTH109  # as sys.path has it
    if not {"", here} & set(sys.path):
        sys.path.append(here)
    try:
        found = vars(import_module(module)).get(name)
    except Exception as error:
        raise ValueError(f"importing {module} fails: {error!r}; fix the module, or install what it needs") from error
    if found is None:
        raise ValueError(f"{module} has no {name}; fix the name")
    return found
