"""Let former names of modules, and of what moved between modules, work for one release, with a warning.

Python asks the finder of this module before its own. It imports a former name as the module that has the code now, and gives
modules that have lost names to others a `__getattr__`. The names are in `rlhf_core.moved.names`.
"""

import importlib.abc
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from rlhf_core.moved.names import EMPTIED, MOVED, MOVED_NAMES


def find_former_names() -> None:
    """Let this process import former names. The packages of the core call this as they are imported."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def present_name(name: str) -> str:
    """The present name of a module.

    >>> present_name("rlhf_core.data.worlds.support"), present_name("my_rewards.length")
    ('rlhf_contrib.worlds.support', 'my_rewards.length')
    """
    former = _moved_part(name)
    return MOVED[former] + name.removeprefix(former) if former else name


def present_module(name: str) -> str:
    """The present name of a module that a configuration names, with a warning for a former one."""
    if former := _moved_part(name):
        _warn(former, MOVED[former], stacklevel=3)
    return present_name(name)


def _moved_part(name: str) -> str:
    """The module of `MOVED` that `name` is, or lies in; "" if it has not moved."""
    return next((former for former in MOVED if f"{name}.".startswith(f"{former}.")), "")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by their former names, and modules that have lost names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _moved_part(fullname):
            return spec_from_loader(fullname, self)
        if fullname in EMPTIED:
            return ModuleSpec(fullname, None, is_package=True)
        if fullname not in MOVED_NAMES and not _is_in_stages(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Put the present module in the place of `module`, so that classes are equal under both names."""
        former = module.__name__
        if former in MOVED:
            _warn(former, MOVED[former], stacklevel=3)
        sys.modules[former] = import_module(present_name(former))


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        former = module.__name__

        def moved_name(name: str) -> Any:
            present = _place(module, name)
            found = vars(import_module(present)).get(name) if present else None
            if found is None:
                raise AttributeError(f"module {former!r} has no attribute {name!r}")
            _warn(f"{former}.{name}", f"{present}.{name}", stacklevel=3)
            setattr(module, name, found)
            return found

        vars(module)["__getattr__"] = moved_name
        super().exec_module(module)


def _is_in_stages(module: str) -> bool:
    return module.startswith("stages.") and module.count(".") == 1


def _place(module: ModuleType, name: str) -> str:
    """The module that has a name which `module` had; "" if none has. The package of a stage had what is in `run` now."""
    for present, names in MOVED_NAMES.get(module.__name__, {}).items():
        if name in names.split():
            return present
    is_stage = _is_in_stages(module.__name__) and "__path__" in vars(module)
    return f"{module.__name__}.run" if is_stage and name != "run" and not name.startswith("_") else ""


def _warn(former: str, present: str, *, stacklevel: int) -> None:
    text = f"{former} is now {present}; the former name works until 0.4"
    warnings.warn(text, FutureWarning, stacklevel=stacklevel)
