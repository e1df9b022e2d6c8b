"""Find and hash the user's code that decides a result: the file that is configured and all user modules it reaches.

User modules are those that are neither in the standard library, nor in installed packages, nor in this program: they
change between runs without a change of version. They are found without importing anything.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import os
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, explain, nearest
from rlhf_core.store.fingerprint import (
    OUR_PACKAGES,
    canonical_json,
    functions_of,
    hash_file,
    hash_tree,
    imported_names,
    parse_source,
    sha256_text,
    top_level_names,
    tree_digest,
)
from rlhf_core.user_code.loading import load_callable, search_path

DECLARATION = "DEPENDS_ON"
"""Name by which a user's module declares what else decides its results: `DEPENDS_ON = ("answers.json", "env:MODEL")`.
Files and folders are relative to the module's own folder."""
ENVIRONMENT = "env:"
PROGRAM_PACKAGES = (*OUR_PACKAGES, "pipelines")

_READS = {
    "open": "reads files",
    "read_text": "reads files",
    "read_bytes": "reads files",
    "environ": "reads environment variables",
    "getenv": "reads environment variables",
    "import_module": "imports modules by a computed name",
    "__import__": "imports modules by a computed name",
    "exec": "runs code from text",
}
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
_SPACE = (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE)


@dataclass(frozen=True, slots=True)
class Source:
    """The analysis of one user file: the digest of its code, its imports, declarations and undeclared reads."""

    digest: str
    imports: tuple[str, ...]
    declared: tuple[str, ...]
    reads: tuple[tuple[str, int], ...]
    """Name and line of each use of something beyond the code, such as `open`."""
    names: frozenset[str] | None
    """Names at its top level; None if this Python cannot parse the file."""
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserModule:
    """A user module. `name` has no folder, so that the same file under another path is the same code."""

    name: str
    path: Path
    source: Source


def user_code_digest(spec: str, *, key: str = "callable") -> str:
    """Return the digest of the function's file, of all user modules that it reaches, and of what they declare.

    `spec` is `package.module:function` or `path/to/file.py:function`. Comments do not count; docstrings and decorators
    do, because a docstring may be a prompt and a decorator a cache. Raises ConfigError, naming the `key` that holds the
    spec, if the file does not exist, does not define the function, or declares something that does not exist.
    """
    return sha256_text(canonical_json(user_code(spec, key=key)))


def check_functions(digests: Mapping[str, str], *, key: str) -> None:
    """Raise ConfigError if a function's digest has changed since the key of a stage was computed.

    Call it before and after loading a function, because the file may be edited in between.
    """
    for spec, digest in digests.items():
        if user_code_digest(spec, key=key) != digest:
            raise _changed(key, spec)


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A user's function by name, for the worker processes of a stage, with its digest in the stage's key."""

    spec: str
    digest: str

    @classmethod
    def of(cls, spec: str, digest: str) -> UserFunction:
        """Return the function with the absolute path of its file, since other processes may run in other folders."""
        location, _, name = spec.rpartition(":")
        return cls(f"{Path(location).resolve()}:{name}" if location.endswith(".py") else spec, digest)

    def load(self, *, key: str) -> Any:
        """Return the function, loaded once per process. Raises ConfigError if its digest has changed."""
        return _loaded(self, key)


@lru_cache(maxsize=64)
def _loaded(function: UserFunction, key: str) -> Any:
    check_functions({function.spec: function.digest}, key=key)
    found = load_callable(key, function.spec)
    check_functions({function.spec: function.digest}, key=key)
    return found


def check_files(digests: Mapping[str, str], *, key: str) -> None:
    """Raise ConfigError if a file's digest has changed since the key of a stage was computed."""
    for name, digest in digests.items():
        path = Path(name)
        if not path.is_file() or _file_digest(path, *_status(path)) != digest:
            raise _changed(key, name)


def _changed(key: str, name: str) -> ConfigError:
    rule = "its code, or what it depends on, has changed since the stage began, and the result would mix both versions"
    return ConfigError(explain(key, name, rule, "run again to use the new version, or restore the old one to resume"))


def user_code(spec: str, *, key: str = "callable") -> dict[str, str]:
    """Return the digests by module, file or variable from which `user_code_digest` is computed. Raises as it does."""
    found: dict[str, str] = {}
    for module in user_modules(spec, key=key):
        found[module.name] = module.source.digest
        for entry in module.source.declared:
            found[f"{module.name}: {entry}"] = _declared_digest(module, entry, key)
    return dict(sorted(found.items()))


def unseen_reads(spec: str, *, key: str = "callable") -> list[str]:
    """Return phrases that describe what a function reads outside its key; [] if nothing was found.

    Modules that declare `DEPENDS_ON` are not searched.
    """
    phrases = []
    for module in user_modules(spec, key=key):
        places: dict[str, list[str]] = {}
        for name, line in module.source.reads if not module.source.declared else ():
            places.setdefault(_READS[name], []).append(f"{name}, line {line}")
        phrases += [f"{module.path.name} {what} ({'; '.join(where[:3])})" for what, where in places.items()]
    return phrases


def user_modules(spec: str, *, key: str = "callable") -> list[UserModule]:
    """Return the module that `spec` names, followed by all user modules that it imports, transitively."""
    place, _, function = spec.rpartition(":")
    if not place or not function.isidentifier():
        raise ConfigError(explain(key, spec, "must read module:function or file.py:function", "add the name"))
    from_file = place.endswith(".py")
    search = _search_path(Path(place) if from_file else None)
    path = Path(place) if from_file else _find(place, search)
    if path is None or not path.is_file():
        raise ConfigError(explain(key, spec, f"{place} does not exist", "fix the module name or the path"))
    first = UserModule(path.name if from_file else place, path, _source(path, "" if from_file else place))
    _check_function(spec, first, key)
    found = {path.resolve(): first}
    # Importing a.b.c runs a and a.b before it.
    waiting = list(_own((*_parents("" if from_file else place), *first.source.imports), search))
    while waiting:
        name, imported = waiting.pop()
        if imported.resolve() in found:
            continue
        module = UserModule(name, imported, _source(imported, name))
        found[imported.resolve()] = module
        waiting += _own(module.source.imports, search)
    return [first, *sorted(list(found.values())[1:], key=lambda module: module.name)]


def _check_function(spec: str, module: UserModule, key: str) -> None:
    place, _, function = spec.rpartition(":")
    names = module.source.names
    if names is None:
        parse_source(module.path.read_bytes(), str(module.path))  # raises, and says what is wrong with it
    elif function not in names and "*" not in names:
        remedy = nearest(function, module.source.functions)
        raise ConfigError(explain(key, spec, f"{place} has no {function}", remedy))


# ---------------------------------------------------------------- where modules lie


def _search_path(file: Path | None) -> list[Path]:
    """Return the folders, in Python's order, in which the imports of a user's `file`, or of a module, are searched.

    The folder of the file comes last, as `rlhf_core.user_code.loading.load_file` adds it; folders of other user files
    are excluded.
    """
    folders = [Path(entry) for entry in search_path()]
    return folders + ([file.resolve().parent] if file is not None else [])


def _own(names: Sequence[str], search: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name and file of the user modules among the imported `names`."""
    for name in names:
        if name.split(".")[0] not in PROGRAM_PACKAGES:
            path = _find(name, search)
            if path is not None and _is_users_own(path):
                yield name, path


def _find(name: str, search: Sequence[Path]) -> Path | None:
    """Return the file of a module; None if it has none (a namespace package, a built-in module, a zip file)."""
    folders, (top, *rest) = list(search), name.split(".")
    for depth, part in enumerate((top, *rest)):
        found, inside = _in_folders(part, folders)
        if found is None and not inside and depth == 0:
            found, inside = _by_finders(top)  # editable installs register their own finders
        if found is not None and rest and not _is_users_own(found):
            return found  # nothing below an installed package is the user's
        if depth == len(rest):
            return found
        folders = inside
    return None


def _in_folders(part: str, folders: Sequence[Path]) -> tuple[Path | None, list[Path]]:
    """Return the file of the module `part` and the folders of its submodules."""
    spaces = []
    for folder in folders:
        package = folder / part / "__init__.py"
        if package.is_file():
            return package, [package.parent]
        for suffix in (*EXTENSION_SUFFIXES, ".py"):
            if (folder / f"{part}{suffix}").is_file():
                return folder / f"{part}{suffix}", []
        if (folder / part).is_dir():
            spaces.append(folder / part)
    return None, spaces


def _by_finders(top: str) -> tuple[Path | None, list[Path]]:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None, []
    if spec is None:
        return None, []
    origin = Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None
    return origin, [Path(folder) for folder in spec.submodule_search_locations or ()]


def _is_users_own(path: Path) -> bool:
    resolved = path.resolve()
    if {"site-packages", "dist-packages"} & set(resolved.parts):
        return False
    return not any(resolved.is_relative_to(folder) for folder in _installed())


@lru_cache(maxsize=1)
def _installed() -> tuple[Path, ...]:
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(place).resolve() for place in places if place})


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


# ---------------------------------------------------------------- what is in them


def _source(path: Path, name: str) -> Source:
    return _read(path, name, *_status(path))


def _status(path: Path) -> tuple[int, int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=8192)
def _file_digest(path: Path, *status: int) -> str:
    """Return the digest of a file; `status` is part of the cache key, so a changed file is read again."""
    return hash_file(path)


@lru_cache(maxsize=8192)
def _read(path: Path, name: str, *status: int) -> Source:
    """Return the analysis of a file; `status` is part of the cache key, so a changed file is read again."""
    content = path.read_bytes()
    try:
        tree = parse_source(content, str(path))
        digest = _code_digest(content)
    except (ConfigError, ValueError, RecursionError, tokenize.TokenError):
        # Compiled, or written for another Python: a file that cannot be parsed counts with all its bytes.
        return Source(hash_file(path), (), (), (), None, ())
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    reads = tuple((name, line) for name, line in _names(tree) if name in _READS)
    imports = tuple(sorted(imported_names(tree, package) - {""}))
    names = frozenset(top_level_names(tree))
    return Source(digest, imports, _declared(tree, path), reads, names, tuple(functions_of(tree)))


def _code_digest(content: bytes) -> str:
    """Return a digest of the code that ignores comments and line layout."""
    tokens = tokenize.tokenize(io.BytesIO(content).readline)
    kept = [[token.type, "" if token.type in _SPACE else token.string] for token in tokens if token.type not in _LAYOUT]
    return sha256_text(canonical_json(kept))


def _names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the names that the code uses, as variables or attributes, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno


# ---------------------------------------------------------------- what they declare


def _declared(tree: ast.Module, path: Path) -> tuple[str, ...]:
    """Return the entries of `DEPENDS_ON`. Raises ConfigError if it is not one literal list of strings."""
    bindings = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == DECLARATION]
    bindings = [node for node in bindings if isinstance(node.ctx, ast.Store)]
    values = [node.value for node in tree.body if _binds(node) and isinstance(node, (ast.Assign, ast.AnnAssign))]
    if not bindings:
        return ()
    items = (
        values[0].elts if len(values) == len(bindings) == 1 and isinstance(values[0], (ast.Tuple, ast.List)) else None
    )
    texts = [item.value for item in items or () if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    if items is None or len(texts) < len(items):
        example = f'write it once, at the top level: {DECLARATION} = ("answers.json", "env:MODEL")'
        rule = "must be a plain list of texts"
        raise ConfigError(explain(f"{path.name}: {DECLARATION}", f"line {bindings[0].lineno}", rule, example))
    return tuple(texts)


def _binds(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == DECLARATION for target in targets)


def _declared_digest(module: UserModule, entry: str, key: str) -> str:
    if entry.startswith(ENVIRONMENT):
        value = os.environ.get(entry.removeprefix(ENVIRONMENT))
        return "unset" if value is None else sha256_text(value)
    path = module.path.parent / entry
    if path.is_file():
        return hash_file(path)
    if path.is_dir():
        return tree_digest(hash_tree(path))
    rule = f"{module.path.name} depends on {entry}, which is not in {module.path.resolve().parent}"
    raise ConfigError(explain(key, module.path.name, rule, f"fix {DECLARATION}, or add the file"))
