"""Digests of values, files, folders and code. Everything that enters the key of a stage is made here."""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, explain, nearest

OUR_PACKAGES = ("stages", "rlhf_core")
PLUMBING = frozenset(
    f"rlhf_core.{name}"
    for name in (
        "artifacts",
        "attempts",
        "checkpoint_parts",
        "checkpoints",
        "errors",
        "fingerprint",
        "leases",
        "records",
        "stage",
        "stage_decision",
        "stage_key",
        "store_layout",
        "store_maintenance",
    )
)
"""Modules that carry artifacts and never compute what is in them: a change there re-makes nothing."""

_HASH_THREADS = min(16, max(2, os.cpu_count() or 2))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What a folder's listing says of one file: its `size` in bytes and the `sha256` of its content.

    >>> FileEntry(size=0, sha256=sha256_text("")).sha256[:8]
    'e3b0c442'
    """

    size: int
    sha256: str


# ---------------------------------------------------------------- values


def canonical_json(value: Any) -> str:
    """Return the one JSON text of `value`: keys sorted, no spaces, floats by `repr`; tuples read as lists.

    Raises ConfigError, naming the place in `value`, for what has no stable text: callables, sets, paths, objects,
    NaN and infinity.

    >>> canonical_json({"b": (1, 2.5), "a": None})
    '{"a":null,"b":[1,2.5]}'
    """
    return json.dumps(_plain(value, ""), sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_text(text: str) -> str:
    """Return the sha256 of `text` in UTF-8 as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        if math.isfinite(value):
            return value
        raise ConfigError(explain(where or "value", value, "must be finite in a key", "give a finite number"))
    if isinstance(value, Mapping):
        return {_name(key, where): _plain(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ConfigError(
        explain(
            where or "value",
            value,
            f"a {type(value).__name__} has no stable text, so it cannot enter a key",
            "use numbers, text, lists and tables",
        )
    )


def _name(key: Any, where: str) -> str:
    if type(key) is str:
        return key
    raise ConfigError(explain(where or "value", key, "names in a key must be text", "write the name as text"))


# ---------------------------------------------------------------- files


def hash_file(path: Path) -> str:
    """Return the sha256 of the file's content as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_files(folder: Path) -> tuple[str, ...]:
    """Return the posix paths, relative to `folder`, of all files below it, sorted; empty folders do not count."""
    found = [
        Path(parent, name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
    ]
    return tuple(sorted(found))


def hash_tree(folder: Path) -> dict[str, FileEntry]:
    """Return relative posix path -> size and sha256 for every file below `folder`; files are hashed in threads."""
    return hash_files(folder, list_files(folder))


def hash_files(folder: Path, paths: Iterable[str]) -> dict[str, FileEntry]:
    """Return path -> size and sha256 for the given relative `paths` below `folder`."""

    def entry(path: str) -> FileEntry:
        return FileEntry(size=(folder / path).stat().st_size, sha256=hash_file(folder / path))

    ordered = sorted(paths)
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(ordered, pool.map(entry, ordered), strict=True))


def tree_digest(files: Mapping[str, FileEntry], under: str = "") -> str:
    """Return the sha256 over names and contents of the files below the folder `under`, whose own name does not count.

    A folder inside an object has the same digest as the same folder alone, so a stage that reads only that folder is
    not run again when its neighbours change.
    """
    prefix = f"{under.rstrip('/')}/" if under else ""
    inside = {path[len(prefix) :]: entry.sha256 for path, entry in files.items() if path.startswith(prefix)}
    return sha256_text(canonical_json(inside))


# ---------------------------------------------------------------- code


def code_digest(module_name: str, packages: tuple[str, ...] = OUR_PACKAGES) -> str:
    """Return one digest of the code of `module_name` and of all modules of `packages` that it imports, transitively."""
    return sha256_text(canonical_json(module_digests(module_name, packages)))


def module_digests(module_name: str, packages: tuple[str, ...] = OUR_PACKAGES) -> dict[str, str]:
    """Return module name -> digest of its syntax tree, for `module_name` and every module of `packages` it reaches.

    Imports inside functions count. Comments, docstrings and decorators do not, nor do the modules of `PLUMBING`.
    Nothing is imported.
    """
    found: dict[str, str] = {}
    waiting = [module_name]
    while waiting:
        name = waiting.pop()
        if name in found or (name in PLUMBING and name != module_name):
            continue
        path = _module_file(name)
        if path is None:
            if name == module_name:
                raise ConfigError(explain("module", name, "has no source file", "name a Python module on the path"))
            continue
        status = path.stat()
        digest, imports = _parsed(str(path), name, status.st_mtime_ns, status.st_size)
        found[name] = digest
        waiting.extend(target for target in imports if target.split(".")[0] in packages)
    return dict(sorted(found.items()))


def callable_digest(spec: str, *, key: str = "callable") -> str:
    """Return the digest of the whole source of the module of a function that a user gave, without importing it.

    `spec` reads `package.module:function` or `path/to/file.py:function`. Raises ConfigError, naming the `key` that holds
    it, if the file is not there or does not name the function.
    """
    place, _, function = spec.rpartition(":")
    if not place or not function.isidentifier():
        raise ConfigError(explain(key, spec, "must read module:function or file.py:function", "add the name"))
    path = Path(place) if place.endswith(".py") else _module_file(place)
    if path is None or not path.is_file():
        raise ConfigError(explain(key, spec, f"{place} is not there", "mend the module name or the path"))
    source = path.read_bytes()
    tree = _parse(source, str(path))
    names = _top_level_names(tree)
    if function not in names and "*" not in names:
        raise ConfigError(explain(key, spec, f"{place} has no {function}", nearest(function, _functions(tree))))
    return hashlib.sha256(source).hexdigest()


def _module_file(name: str) -> Path | None:
    """Return the source file of a module without importing it or its packages; None for what is not a module."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for depth in range(2, len(rest) + 2):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = ".".join([top, *rest][:depth])
        spec = importlib.machinery.PathFinder.find_spec(full_name, list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


@lru_cache(maxsize=4096)
def _parsed(path: str, name: str, modified_ns: int, size: int) -> tuple[str, tuple[str, ...]]:
    """Return digest and imported names of one module; time and size of the file are there to refresh the cache."""
    tree = _parse(Path(path).read_bytes(), path)
    package = name if Path(path).name == "__init__.py" else name.rpartition(".")[0]
    return sha256_text(_syntax(tree)), tuple(sorted(_imports(tree, package)))


def _parse(source: bytes, path: str) -> ast.Module:
    try:
        return ast.parse(source, filename=path)
    except SystemError:  # CPython 3.11 counts the depth of all threads' parsing in one place; alone it is right
        return _parse(source, path)
    except SyntaxError as error:
        raise ConfigError(explain("module", path, f"is not valid Python ({error})", "mend the file")) from error


def _syntax(node: ast.AST) -> str:
    """Return a text of the tree without positions, docstrings, decorators and empty fields.

    Written out here because the text of `ast.dump` changes between Python versions.
    """
    parts = [type(node).__name__]
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "type_comment", "kind", "ctx") or value is None or value == []:
            continue
        if isinstance(value, ast.AST):
            parts.append(f"{field}={_syntax(value)}")
        elif isinstance(value, list):
            items = (_syntax(item) if isinstance(item, ast.AST) else repr(item) for item in value if not _is_text(item))
            parts.append(f"{field}=[{','.join(items)}]")
        else:
            parts.append(f"{field}={value!r}")
    return f"({' '.join(parts)})"


def _is_text(node: Any) -> bool:
    """Say whether a statement is a lone string: a docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _imports(tree: ast.Module, package: str) -> set[str]:
    """Return every module name that the tree may import, with the packages that hold them."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    parts = [name.split(".") for name in names]
    return {".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)}


def _functions(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _top_level_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names
