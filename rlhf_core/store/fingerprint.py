"""Compute digests of values, files, folders and code: everything that enters the key of a stage."""

import ast
import hashlib
import importlib.util
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError, ConfigError

OUR_PACKAGES = ("stages", "rlhf_core", "rlhf_contrib")
PLUMBING = ("rlhf_core.errors", "rlhf_core.schema.secrets", "rlhf_core.secrets", "rlhf_core.stage", "rlhf_core.store")
"""Modules and packages that store artifacts but never compute their content: a change there changes no key."""

_FEW_BYTES = 1 << 20  # fewer bytes in total are hashed faster than threads can be started
_HASH_THREADS = min(16, max(2, os.cpu_count() or 2))

ALL_MODULES = ".__path__"
"""Suffix for the name of a package that imports all of its modules by looking them up with `pkgutil`."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The entry of one file in a folder's listing: its `size` in bytes and the `sha256` of its content.

    >>> FileEntry(size=0, sha256=sha256_text("")).sha256[:8]
    'e3b0c442'
    """

    size: int
    sha256: str


# ---------------------------------------------------------------- values


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of `value`: keys sorted, no spaces, floats by `repr`, tuples as lists.

    Raises ConfigError, naming the place in `value`, for values without a stable text: callables, sets, paths,
    objects, NaN and infinity.

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
        raise ConfigError(where or "value", value, "must be finite in a key", "give a finite number")
    if isinstance(value, Mapping):
        return {_name(key, where): _plain(item, f"{where}.{key}" if where else str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ConfigError(
        where or "value",
        value,
        f"a {type(value).__name__} has no stable text form, so it cannot be part of a key",
        "use numbers, text, lists and tables",
    )


def _name(key: Any, where: str) -> str:
    if type(key) is str:
        return key
    raise ConfigError(where or "value", key, "names in a key must be text", "write the name as text")


# ---------------------------------------------------------------- files


def hash_file(path: Path) -> str:
    """Return the sha256 of the file's content as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_files(folder: Path) -> tuple[str, ...]:
    """Return the sorted posix paths, relative to `folder`, of all files below it; empty folders do not count.

    Links are followed. Raises ArtifactError for a link to a folder that contains it, because it would never end.
    """
    found = []
    above = {os.fspath(folder): frozenset({folder.resolve()})}
    for parent, inside, names in os.walk(folder, followlinks=True):
        found += [Path(parent, name).relative_to(folder).as_posix() for name in names]
        holders = above.pop(parent)
        for name in inside:
            path = Path(parent, name)
            place = path.resolve() if path.is_symlink() else path
            if path.is_symlink() and any(holder.is_relative_to(place) for holder in holders):
                rule = "is a link to a folder that contains it"
                raise ArtifactError("folder", str(path), rule, "remove the link")
            above[os.path.join(parent, name)] = holders | {place} if path.is_symlink() else holders  # noqa: PTH118  # as os.walk
    return tuple(sorted(found))


def hash_tree(folder: Path) -> dict[str, FileEntry]:
    """Return size and sha256 of every file below `folder` by relative posix path; files are hashed in threads."""
    return hash_files(folder, list_files(folder))


def regular_status(path: Path) -> os.stat_result:
    """Return the status of a file. Raises ArtifactError for what is none, such as a pipe, which may never end."""
    try:
        status = path.stat()
    except OSError as error:
        if not path.is_symlink():
            raise
        raise ArtifactError("file", str(path), f"is a link to no file ({error.strerror})", "remove it") from None
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError("file", str(path), "is a pipe, a device or a socket, not a file", "remove it")
    return status


def hash_files(folder: Path, paths: Iterable[str]) -> dict[str, FileEntry]:
    """Return size and sha256 of the given relative `paths` below `folder`, by path."""

    ordered = sorted(paths)
    sizes = {path: regular_status(folder / path).st_size for path in ordered}

    def entry(path: str) -> FileEntry:
        return FileEntry(size=sizes[path], sha256=hash_file(folder / path))

    if sum(sizes.values()) < _FEW_BYTES:
        return {path: entry(path) for path in ordered}
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(ordered, pool.map(entry, ordered), strict=True))


def tree_digest(files: Mapping[str, FileEntry], under: str = "") -> str:
    """Return the sha256 over names and contents of the files below the folder `under`, without the folder's own name.

    A folder inside an object has the same digest as the same folder alone, so a stage that reads only that folder
    does not run again when its neighbors change.
    """
    prefix = f"{under.rstrip('/')}/" if under else ""
    inside = {path[len(prefix) :]: entry.sha256 for path, entry in files.items() if path.startswith(prefix)}
    return sha256_text(canonical_json(inside))


# ---------------------------------------------------------------- code


def code_digest(module_name: str, packages: tuple[str, ...] = OUR_PACKAGES) -> str:
    """Return one digest of the code of `module_name` and of all modules of `packages` it imports, transitively."""
    return sha256_text(canonical_json(module_digests(module_name, packages)))


def module_digests(module_name: str, packages: tuple[str, ...] = OUR_PACKAGES) -> dict[str, str]:
    """Return the digest of the syntax tree of `module_name` and of every module of `packages` it reaches, by name.

    Imports inside functions count, those for type checkers alone do not, and a package that uses its own `__path__`
    imports all of its modules. Comments, docstrings and the modules of `PLUMBING` do not count. The modules are parsed,
    not imported.
    """
    found: dict[str, str] = {}
    modules = _Modules()
    waiting = [module_name]
    while waiting:
        name = waiting.pop()
        if name in found or (name != module_name and _is_plumbing(name)):
            continue
        path = modules.file(name)
        if path is None:
            if name == module_name:
                raise ConfigError(
                    "module", name, "is not installed", "install the whole wheel, or name a module on the path"
                )
            continue
        digest, imports = analysis_of(Path(path), name, Path(path).read_bytes(), _digest_and_run_imports)
        found[name] = digest
        for target in imports:
            if target.split(".")[0] in packages:
                waiting += modules.inside(target) if target.endswith(ALL_MODULES) else [target]
    return dict(sorted(found.items()))


def _is_plumbing(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in PLUMBING)


class _Modules:
    """A finder of source files that imports neither modules nor packages."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def file(self, name: str) -> str | None:
        """Return the path of the module's source; None if `name` is not a module."""
        spec = self._spec(name)
        return spec.origin if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None

    def inside(self, target: str) -> list[str]:
        """Return the names of the modules of a package that is given as `package.__path__`."""
        package = target.removesuffix(ALL_MODULES)
        files = Path(self.file(package) or "").parent.glob("*.py")
        return [f"{package}.{file.stem}" for file in files if file.stem != "__init__"]

    def _spec(self, name: str) -> ModuleSpec | None:
        if name not in self._specs:
            package = name.rpartition(".")[0]
            if package:
                above = self._spec(package)
                folders = None if above is None else above.submodule_search_locations
                self._specs[name] = PathFinder.find_spec(name, list(folders)) if folders else None
            else:
                with suppress(ImportError, ValueError):
                    self._specs[name] = importlib.util.find_spec(name)
        return self._specs.setdefault(name, None)


ANALYSES: dict[str, list[Any]] = {}
"""Digest of a module's name and content -> the analysis of its code, in the order of last use.

`rlhf_core.store.index` keeps it between processes, because to parse code is the slowest part of a plan.
"""


def analysis_of(path: Path, name: str, content: bytes, analyse: Callable[[Path, str, bytes], list[Any]]) -> list[Any]:
    """Analysis of a module as JSON values: `analyse(path, name, content)`, unless this content was analysed before.

    The path must count only by whether the module is a package.
    """
    given = f"{analyse.__qualname__} {name} {path.name == '__init__.py'}\n".encode()
    key = hashlib.sha256(given + content).hexdigest()
    found = ANALYSES.pop(key, None) or analyse(path, name, content)
    ANALYSES[key] = found
    return found


def _digest_and_run_imports(path: Path, name: str, content: bytes) -> list[Any]:
    tree = parse_source(content, str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes = list(ast.walk(tree))
    imports = imported_names(_nodes_that_run(tree), package)
    if any(isinstance(node, ast.Name) and node.id == "__path__" for node in nodes):
        imports.add(package + ALL_MODULES)
    return [sha256_text(_syntax(tree)), sorted(imports)]


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree but for those below `if TYPE_CHECKING`, whose imports only a type checker reads."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _nodes_that_run(other)
        else:
            yield from _nodes_that_run(child)


def parse_source(source: bytes, path: str) -> ast.Module:
    try:
        return ast.parse(source, filename=path)
    except SystemError:  # CPython 3.11 shares one parser depth counter between threads; a second try is right
        return parse_source(source, path)
    except SyntaxError as error:
        raise ConfigError("module", path, f"is not valid Python ({error})", "fix the file") from error


def _syntax(node: ast.AST) -> str:
    """Return the tree as text without positions, comments, docstrings and empty fields.

    `ast.dump` is not used because its output changes between Python versions.
    """
    parts = [type(node).__name__]
    for field in node._fields:
        value = getattr(node, field, None)
        if value is None or value == [] or field in ("type_comment", "kind", "ctx"):
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
    """Return whether a statement is only a string: the docstring of a module, class, function or attribute."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def imported_names(nodes: Iterable[ast.AST], package: str) -> set[str]:
    """Return the name of every module that the nodes of a tree may import, and of the packages that contain them."""
    names: set[str] = set()
    for node in nodes:
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


def functions_of(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that a module binds outside of functions and classes, also inside `if` and `try`."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        else:
            waiting += ast.iter_child_nodes(node)
    return names
