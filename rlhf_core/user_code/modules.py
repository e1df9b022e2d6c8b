"""Load the functions and classes that a configuration names: `package.module:name` or `path/to/file.py:name`.

Each load has fresh modules of the user's code, compiled from the bytes that were hashed: two files whose helpers have
the same name, and a helper that is edited between two stages of one process, do not conflict. A module keeps its name
in `sys.modules`, where `pickle`, `dataclasses` and `typing` look it up, unless another load has taken it: then it is
`name__2`. Import statements and `__import__` in user code go through `Modules`, in the builtins of its modules.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain, count
from pathlib import Path
from threading import RLock
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

from rlhf_core.errors import ConfigError, nearest
from rlhf_core.moved import present_module
from rlhf_core.processes.installed import is_users_own
from rlhf_core.user_code.sources import (
    ADDED,
    BEFORE,
    PROGRAM_PACKAGES,
    Place,
    by_finders,
    changed_code_error,
    digest_of,
    in_folders,
    locate,
    program_path,
    reached_from,
    search_folders,
    seen_files,
)
from rlhf_core.user_code.watch import MARK, Watch

_TAKEN: dict[str, tuple[Modules, Place]] = {}
"""Name in `sys.modules`, without dots -> the load that it belongs to, and where the module lies."""
_LOADING = RLock()
CLOUDPICKLE = ("cloudpickle", "joblib.externals.cloudpickle")
_COMPILED: dict[Path, str] = {}
"""Compiled module -> digest of the file that this process has loaded, or is about to."""


class Modules:
    """The modules of the user's that one file or module, at `location`, is and imports.

    Files and modules that they reach beyond the key are noted in the file `notes`.
    ConfigError if a function in `code` that lies there has another digest, or if it needs a compiled module of which this
    process has loaded another version.
    """

    def __init__(self, key: str, location: str, *, code: Mapping[str, str], notes: str = "") -> None:
        reached = reached_from(location)
        for spec, digest in code.items():
            if Path(spec.rpartition(":")[0]) == Path(location) and digest_of(reached, key=key) != digest:
                raise changed_code_error(key, spec)
        for module in (one for one in reached if one.path.suffix != ".py"):
            if _COMPILED.setdefault(module.path, module.source.digest) != module.source.digest:
                rule = "is compiled, and this process has loaded another version of it"
                raise ConfigError(key, str(module.path), rule, "run again in a new process")
        self._file = Path(location) if location.endswith(".py") else None
        self._sources = {module.path.resolve(): module.source for module in reached}
        self._path = program_path()
        self._is_running = False
        self._names: dict[str, str] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}
        if notes:
            self.builtins[MARK] = Watch(Path(notes), seen_files(reached))
        if _FINDER not in sys.meta_path:  # imports then see the modules of loads
            sys.meta_path.insert(0, _FINDER)
            importlib.import_module = _import_module_of_caller
        if self._file is not None:
            folder = str(self._file.resolve().parent)
            if folder not in self._path:
                self._path.append(folder)
                ADDED.add(folder)
            self._name = self._take(f"file_{self._file.stem}", Place(self._file))
        for module in reached[self._file is not None :]:
            self._top(module.name.partition(".")[0])  # before anyone else imports it, such as pickle

    def run(self) -> ModuleType:
        """Run the file as a new module; a second run shares the imports of the first."""
        spec = _FINDER.find_spec(self._name)
        assert spec is not None and spec.loader is not None
        module = sys.modules[self._name] = module_from_spec(spec)
        with self._own_path():
            spec.loader.exec_module(module)
        return module

    def import_module(self, name: str) -> ModuleType:
        """Import `name`: the module of this load, or a module that is not the user's."""
        with self._own_path():
            return importlib.import_module(self.named(name))

    def named(self, name: str) -> str:
        """The name in `sys.modules` of the module that an import here names `name`."""
        top, dot, rest = name.partition(".")
        return f"{self._top(top)}{dot}{rest}"

    def content(self, path: Path) -> bytes:
        """The bytes of a file at the time of hashing, or its present bytes if the key does not cover it."""
        source = self._sources.get(path.resolve())
        return path.read_bytes() if source is None else source.content

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] = (), level: int = 0
    ) -> ModuleType:
        found = __import__(name if level else self.named(name), globals, locals, fromlist, level)
        self._pickle_by_value()
        return found

    def _pickle_by_value(self) -> None:
        """Make cloudpickle serialize functions of this load by value: a worker of joblib cannot import their module."""
        for pickler in filter(None, map(sys.modules.get, CLOUDPICKLE)):
            register = getattr(pickler, "register_pickle_by_value", None)
            for name, (owner, _) in list(_TAKEN.items()):
                if register is not None and owner is self and name in sys.modules:
                    register(sys.modules[name])

    def _top(self, name: str) -> str:
        if name in _TAKEN and _TAKEN[name][0] is self:
            return name  # as pickle writes it
        if name not in self._names:
            shared = name in PROGRAM_PACKAGES or _is_the_programs(name)
            added = [] if self._is_running else [entry for entry in program_path() if entry not in self._path]
            search = search_folders(self._file, sys.path if self._is_running else [*added, *self._path])
            place = Place(None) if shared else locate(name, search)
            if place == Place(None):  # not remembered: the code may add a folder to the path, and try again
                if shared or name in sys.builtin_module_names or by_finders(name, search) is not None:
                    return name
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)  # here; another load may have one
            self._names[name] = self._take(name, place) if _is_fresh(place) else name
        return self._names[name]

    def _take(self, name: str, place: Place) -> str:
        names = chain([name], (f"{name}__{number}" for number in count(2)))
        free = next(one for one in names if one not in _TAKEN and one not in sys.modules)
        _TAKEN[free] = (self, place)
        return free

    @contextmanager
    def _own_path(self) -> Iterator[None]:
        """Keep the code's additions to the path for this load, and hide the additions of other loads."""
        with _LOADING:
            whole, before = list(sys.path), list(BEFORE)
            BEFORE[:] = program_path()
            sys.path[:] = self._path
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False
                self._path = list(sys.path)
                ADDED.update(entry for entry in self._path if entry not in BEFORE)
                sys.path[:] = [*whole, *(entry for entry in self._path if entry not in whole)]
                BEFORE[:] = before


def _is_the_programs(name: str) -> bool:
    """Whether the program itself has imported a module, such as a package under development: it is in no load.

    A module that a library has imported from a folder added by a load is not the program's.
    """
    if name in _TAKEN or name not in sys.modules:
        return False
    module = sys.modules[name]
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""]
    return not {Path(place).parent for place in places} & {Path(entry) for entry in ADDED}


def _is_fresh(place: Place) -> bool:
    """Whether a module is the user's, and can be loaded twice: a compiled one cannot."""
    if place.file is not None:
        return place.file.suffix == ".py" and is_users_own(place.file)
    return all(map(is_users_own, place.folders))


class _Loader(SourceFileLoader):
    """Compiles the hashed bytes and ignores byte code next to the file."""

    def __init__(self, name: str, path: str, modules: Modules) -> None:
        super().__init__(name, path)
        self._modules = modules

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._modules.content(Path(self.path)), self.path)
        return code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = self._modules.builtins
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of all loads by their names in `sys.modules`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, _ = fullname.partition(".")
        if top not in _TAKEN:
            return None
        modules, place = _TAKEN[top]
        if path is not None:
            place = in_folders(fullname.rpartition(".")[2], [Path(folder) for folder in path])
        if place.file is None:
            spec = ModuleSpec(fullname, None, is_package=True) if place.folders else None
            if spec is not None:
                spec.submodule_search_locations = [str(folder) for folder in place.folders]
            return spec
        if place.file.suffix != ".py":
            return spec_from_file_location(fullname, place.file)
        return spec_from_file_location(fullname, place.file, loader=_Loader(fullname, str(place.file), modules))


_FINDER = _Finder()
_import_module = importlib.import_module


@wraps(_import_module)
def _import_module_of_caller(name: str, package: str | None = None) -> ModuleType:
    modules = getattr(sys._getframe(1).f_builtins["__import__"], "__self__", None)
    if isinstance(modules, Modules):
        name = name if name.startswith(".") else modules.named(name)
        package = package and modules.named(package)
    return _import_module(name, package)


# ---------------------------------------------------------------- loading

NO_DIGESTS: Mapping[str, str] = MappingProxyType({})


def load_callable(key: str, spec: str, *, code: Mapping[str, str] = NO_DIGESTS, notes: str = "") -> Any:
    """Load the function or class that `spec` names, from fresh modules.

    Reads beyond its key are noted in the file `notes` (`rlhf_core.user_code.watch`); "" notes nothing.

    Raises ConfigError, naming the configuration's `key` and the nearest name, if the module, file or name does not
    exist or is not callable, or if its code has another digest than in `code`.

    >>> load_callable("function", "rlhf_core.rewards.verifiable:exact_match").__name__
    'exact_match'
    """
    return load_callables(key, [spec], code=code, notes=notes)[0]


def load_callables(
    key: str, specs: Sequence[str], *, code: Mapping[str, str] = NO_DIGESTS, notes: str = ""
) -> list[Any]:
    """Load the callable for each of `specs`, as `load_callable`; specs of one file share one module and its state."""
    modules: dict[str, ModuleType] = {}
    found = []
    for spec in specs:
        location, separator, _ = spec.rpartition(":")
        if not separator:
            raise ConfigError(key, spec, "must read module:name or file.py:name", "add the name")
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
            files = [other.stem for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
            rule = f"there is no file {path} (seen from {Path.cwd()})"
            raise ConfigError(key, str(path), rule, nearest(path.stem, files, ending=".py"))
        self._key, self._path = key, path
        self._modules = Modules(key, str(path), code=code, notes=notes)

    def run(self) -> ModuleType:
        """Run the file as a fresh module; a second one shares its imports. Raises ConfigError if it fails."""
        try:
            return self._modules.run()
        except Exception as error:
            raise ConfigError(self._key, str(self._path), f"importing it fails: {error!r}", "fix the file") from error


def _load_module(key: str, spec: str, modules: Modules) -> ModuleType:
    location = present_module(spec.rpartition(":")[0])
    try:
        return modules.import_module(location)
    except ModuleNotFoundError as error:
        # A module that exists but imports something missing is a different mistake.
        if error.name is None or not (location == error.name or location.startswith(f"{error.name}.")):
            raise ConfigError(key, spec, f"importing {location} needs {error.name}", "install it") from error
        remedy = nearest(location.rpartition(".")[2], _siblings(location))
        raise ConfigError(key, spec, f"there is no module {error.name}", remedy) from None
    except Exception as error:
        raise ConfigError(key, spec, f"importing {location} fails: {error!r}", "fix the module") from error


def _named(key: str, spec: str, module: ModuleType) -> Any:
    location, _, name = spec.rpartition(":")
    found = vars(module).get(name)
    if found is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(key, spec, f"{location} has no {name}", nearest(name, known))
    if not callable(found):
        raise ConfigError(key, spec, f"{name} is a {type(found).__name__}", "name a function or a class")
    return found


def _siblings(location: str) -> list[str]:
    parent = location.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(parent) if parent else None
    except ModuleNotFoundError:
        return []
    folders = found.submodule_search_locations if found is not None else None
    return [path.stem for folder in folders or () for path in Path(folder).glob("*.py")]
