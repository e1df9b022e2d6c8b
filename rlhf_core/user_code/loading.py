"""Load the functions and classes that a configuration names: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_core.errors import ConfigError, explain, nearest

_ADDED: set[str] = set()


def search_path() -> list[str]:
    """Return the folders in which user modules are searched, both for the key and by the processes that run them.

    They always include the working folder, however this process was started. The folder of a user's file comes last.
    """
    return [*(entry or os.curdir for entry in sys.path if entry not in _ADDED), os.curdir]


def load_callable(key: str, spec: str) -> Any:
    """Return the function or class that `spec` names.

    Raises ConfigError, naming the configuration's `key` and the nearest name, if the module, file or name does not
    exist or is not callable.

    >>> load_callable("function", "rlhf_core.rewards.verifiable:exact_match").__name__
    'exact_match'
    """
    return load_callables(key, [spec])[0]


def load_callables(key: str, specs: Sequence[str]) -> list[Any]:
    """Return the callable for each of `specs`, as `load_callable`; specs of one file share one module and its state."""
    modules: dict[str, ModuleType] = {}
    found = []
    for spec in specs:
        location, separator, _ = spec.rpartition(":")
        if not separator:
            raise ConfigError(explain(key, spec, "must read module:name or file.py:name", "add the name"))
        if location not in modules:
            from_file = location.endswith(".py")
            modules[location] = load_file(key, Path(location)) if from_file else _load_module(key, spec, location)
        found.append(_named(key, spec, modules[location]))
    return found


def load_file(key: str, path: Path) -> ModuleType:
    """Return a fresh module from the file `path`, which may import from its folder. Raises ConfigError if it fails."""
    if not path.is_file():
        files = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
        rule = f"there is no file {path} (seen from {Path.cwd()})"
        raise ConfigError(explain(key, str(path), rule, nearest(path.name, files)))
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
        _ADDED.add(folder)
    name = f"file_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses in the file look themselves up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(explain(key, str(path), f"importing it fails: {error!r}", "fix the file")) from error
    return module


def _load_module(key: str, spec: str, location: str) -> ModuleType:
    try:
        return importlib.import_module(location)
    except ModuleNotFoundError as error:
        # A module that exists but imports something missing is a different mistake.
        if error.name is None or not (location == error.name or location.startswith(f"{error.name}.")):
            raise ConfigError(explain(key, spec, f"importing {location} needs {error.name}", "install it")) from error
        remedy = nearest(location.rpartition(".")[2], _siblings(location))
        raise ConfigError(explain(key, spec, f"there is no module {error.name}", remedy)) from None
    except Exception as error:
        raise ConfigError(explain(key, spec, f"importing {location} fails: {error!r}", "fix the module")) from error


def _named(key: str, spec: str, module: ModuleType) -> Any:
    location, _, name = spec.rpartition(":")
    found = vars(module).get(name)
    if found is None:
        raise ConfigError(explain(key, spec, f"{location} has no {name}", nearest(name, _own_callables(module))))
    if not callable(found):
        raise ConfigError(explain(key, spec, f"{name} is a {type(found).__name__}", "name a function or a class"))
    return found


def _own_callables(module: ModuleType) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _siblings(location: str) -> list[str]:
    parent = location.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(parent) if parent else None
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found is not None else None
    return [path.stem for folder in folders or () for path in Path(folder).glob("*.py")]
