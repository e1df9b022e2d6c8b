"""Find and hash the user's code that decides a result: the configured file and all user modules that it reaches.

User modules are neither in the standard library, nor in installed packages, nor in this program: they
change between runs without a change of version. They are found without importing anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.processes.installed import is_users_own
from rlhf_core.user_code.modules import load_callable
from rlhf_core.user_code.sources import (
    PROGRAM_PACKAGES,
    UserModule,
    changed_code_error,
    code_of,
    digest_of,
    file_digest,
    reached_from,
    search_folders,
    user_modules,
)
from rlhf_core.user_code.watch import unseen_uses


def user_code_digest(spec: str, *, key: str = "callable") -> str:
    """Hash the function's file, all user modules that it reaches, and their declared dependencies.

    `spec` is `package.module:function` or `path/to/file.py:function`. Comments do not count; docstrings and decorators
    do, because a docstring may be a prompt and a decorator a cache. Raises ConfigError, naming the `key` that holds the
    spec, if the file does not exist, does not define the function, or declares something that does not exist.
    """
    return digest_of(user_modules(spec, key=key), key=key)


def check_functions(digests: Mapping[str, str], *, key: str) -> None:
    """Raise ConfigError if a function's digest has changed since the key of a stage was computed.

    Call it after loading a function: its code may have read declared files before they were edited.
    """
    for spec, digest in digests.items():
        if user_code_digest(spec, key=key) != digest:
            raise changed_code_error(key, spec)


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function by name, for the worker processes of a stage, with its digest in the stage's key."""

    spec: str
    digest: str
    notes: str = ""
    """File for reads of the function beyond its key (`rlhf_core.user_code.watch`); "" records none."""

    @classmethod
    def of(cls, spec: str, digest: str, *, notes: str = "") -> UserFunction:
        """The function with the absolute path of its file, since other processes may run in other folders."""
        location, _, name = spec.rpartition(":")
        return cls(f"{Path(location).resolve()}:{name}" if location.endswith(".py") else spec, digest, notes)

    def load(self, *, key: str) -> Any:
        """Load the function, once per process. Raises ConfigError if its digest has changed."""
        return _loaded(self, key)


@lru_cache(maxsize=64)
def _loaded(function: UserFunction, key: str) -> Any:
    found = load_callable(key, function.spec, code={function.spec: function.digest}, notes=function.notes)
    check_functions({function.spec: function.digest}, key=key)
    return found


def check_file_digests(digests: Mapping[str, str], *, key: str) -> None:
    """Raise ConfigError if a file's digest has changed since the key of a stage was computed."""
    for name, digest in digests.items():
        path = Path(name)
        if not path.is_file() or file_digest(path) != digest:
            raise changed_code_error(key, name)


def user_code(spec: str, *, key: str = "callable") -> dict[str, str]:
    """The digests by module, file or variable from which `user_code_digest` is computed. Raises the same errors."""
    return code_of(user_modules(spec, key=key), key=key)


def unseen_reads(spec: str, *, key: str = "callable") -> list[str]:
    """Describe the reads of a function outside its key in phrases; [] if none were found.

    If a module declares files or variables in `DEPENDS_ON`, all of its reads of that kind are taken as declared. Reads
    by installed packages and by this program are covered by their versions.
    """
    return _unseen(user_modules(spec, key=key), spec.rpartition(":")[0])


def unseen_by_programs(files: Sequence[str]) -> list[str]:
    """Describe the imports and reads of the Python programs among `files`, whose bytes are in the key."""
    seen, phrases = {Path(name).resolve() for name in files}, []
    for name in files:
        modules = reached_from(name) if name.endswith(".py") else []
        others = [module for module in modules if module.path.resolve() not in seen]
        phrases += [f"{Path(name).name} imports {module.path}" for module in others]
        phrases += _unseen(modules, name)
    return list(dict.fromkeys(phrases))


def _unseen(modules: Sequence[UserModule], location: str) -> list[str]:
    tops = frozenset(module.name.partition(".")[0] for module in modules)
    search = search_folders(Path(location) if location.endswith(".py") else None)
    return [
        phrase
        for module in modules
        if module.name.partition(".")[0] not in PROGRAM_PACKAGES and is_users_own(module.path)
        for phrase in unseen_uses(module, tops, search)
    ]
