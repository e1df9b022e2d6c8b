"""Load the functions and classes that a configuration names: `package.module:name` or `path/to/file.py:name`.

Each load has fresh modules of the user's code, compiled from the bytes that were hashed: two files whose helpers have the
same name, and a helper that is edited between two stages of one process, do not meet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from rlhf_core.errors import ConfigError, explain, nearest
from rlhf_core.user_code.modules import Modules

NO_DIGESTS: Mapping[str, str] = MappingProxyType({})


def load_callable(key: str, spec: str, *, code: Mapping[str, str] = NO_DIGESTS, notes: str = "") -> Any:
    """Return the function or class that `spec` names, from fresh modules.

    What it reads or reaches beyond its key is noted in the file `notes` (`rlhf_core.user_code.watch`); "" notes nothing.

    Raises ConfigError, naming the configuration's `key` and the nearest name, if the module, file or name does not
    exist or is not callable, or if its code has another digest than in `code`.

    >>> load_callable("function", "rlhf_core.rewards.verifiable:exact_match").__name__
    'exact_match'
    """
    return load_callables(key, [spec], code=code, notes=notes)[0]


def load_callables(
    key: str, specs: Sequence[str], *, code: Mapping[str, str] = NO_DIGESTS, notes: str = ""
) -> list[Any]:
    """Return the callable for each of `specs`, as `load_callable`; specs of one file share one module and its state."""
    modules: dict[str, ModuleType] = {}
    found = []
    for spec in specs:
        location, separator, _ = spec.rpartition(":")
        if not separator:
            raise ConfigError(explain(key, spec, "must read module:name or file.py:name", "add the name"))
        if location not in modules:
            from_file = location.endswith(".py")
            if from_file:
                modules[location] = UserFile(key, Path(location), code=code, notes=notes).run()
            else:
                modules[location] = _load_module(key, spec, Modules(key, location, code=code, notes=notes))
        found.append(_named(key, spec, modules[location]))
    return found


class UserFile:
    """A file of the user's with the modules that it imports; it may import from its folder.

    Raises ConfigError if the file does not exist, or has another digest than in `code`.
    """

    def __init__(self, key: str, path: Path, *, code: Mapping[str, str] = NO_DIGESTS, notes: str = "") -> None:
        if not path.is_file():
            files = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
            rule = f"there is no file {path} (seen from {Path.cwd()})"
            raise ConfigError(explain(key, str(path), rule, nearest(path.name, files)))
        self._key, self._path = key, path
        self._modules = Modules(key, str(path), code=code, notes=notes)

    def run(self) -> ModuleType:
        """Return a fresh module of the file; a second one shares what it imports. Raises ConfigError if it fails."""
        try:
            return self._modules.run()
        except Exception as error:
            raise ConfigError(
                explain(self._key, str(self._path), f"importing it fails: {error!r}", "fix the file")
            ) from error


def _load_module(key: str, spec: str, modules: Modules) -> ModuleType:
    location, _, _ = spec.rpartition(":")
    try:
        return modules.import_module(location)
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
