"""Find and read user modules, which are not in the standard library, an installed package or this program.

They change between runs without a change of version. Nothing is imported for it.
"""

import ast
import hashlib
import io
import os
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, nearest
from rlhf_core.moved import present_module
from rlhf_core.processes.installed import is_users_own
from rlhf_core.store.fingerprint import canonical_json, hash_file, hash_tree, sha256_text, tree_digest
from rlhf_core.user_code.former_digests import FORMER_DIGESTS
from rlhf_core.user_code.syntax import (
    OUR_PACKAGES,
    analysis_of,
    binds_out_of_sight,
    functions_of,
    imported_names,
    parse_source,
    top_level_names,
)
from rlhf_core.user_code.syntax_digest import digest_without_texts

ENVIRONMENT = "env:"
DECLARATION = "DEPENDS_ON"
"""Name of the module variable that lists further dependencies: `DEPENDS_ON = ("answers.json", "env:MODEL")`.
Files and folders are relative to the module's own folder."""
PROGRAM_PACKAGES = (*OUR_PACKAGES, "pipelines")
ADDED: set[str] = set()
"""Entries of `sys.path` that loading a user's file has added: its folder, and the additions of its code."""
BEFORE: list[str] = []
"""`sys.path` without such entries, while a load runs that changes it; otherwise empty."""

_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING)
_SPACE = (tokenize.INDENT, tokenize.DEDENT, tokenize.NEWLINE)


@dataclass(frozen=True, slots=True)
class UserSource:
    """The analysis of one user file: the digest of its code, its imports and declarations."""

    digest: str
    content: bytes
    """The bytes that were hashed, and from which the module is compiled; empty where nothing is."""
    imports: tuple[str, ...]
    declared: tuple[str, ...]
    names: frozenset[str] | None
    """Names at its top level; None if this Python cannot parse the file."""
    functions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UserModule:
    """A user module. `name` has no folder, so that the same file under another path is the same code."""

    name: str
    path: Path
    source: UserSource


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a module: its file (None: a namespace package) and the folders of its submodules."""

    file: Path | None
    folders: tuple[Path, ...] = ()


def is_ours(module: str) -> bool:
    """True for a module of this program."""
    return module.partition(".")[0] in PROGRAM_PACKAGES


def program_path() -> list[str]:
    """`sys.path` without the entries added by loading users' files, also while a thread loads one."""
    path = list(sys.path)
    return [entry for entry in list(BEFORE) or path if entry not in ADDED]


def search_path() -> list[str]:
    """Folders in which user modules are searched, both for the key and by the processes that run them.

    They always include the working folder, however this process was started. The folder of a user's file comes last.
    """
    return [*(entry or os.curdir for entry in program_path()), os.curdir]


def user_code_environment() -> dict[str, str]:
    """Variables of a process that runs user code. It searches modules like this process, and orders sets always alike."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(search_path()), "PYTHONHASHSEED": "0"}


def search_folders(file: Path | None, path: Sequence[str] | None = None) -> list[Path]:
    """Folders, in Python's order, in which the imports of a user's `file`, or of a module, are searched.

    `path` is the path of a load, whose code may have added to it; by default nothing is loaded yet.
    """
    folders = [Path(entry) for entry in (search_path() if path is None else [*path, os.curdir])]
    return folders + ([file.resolve().parent] if file is not None else [])


def user_modules(spec: str, *, key: str = "callable") -> list[UserModule]:
    """Find the module that `spec` names, followed by all user modules that it imports, transitively."""
    place, _, function = spec.rpartition(":")
    if not place or not function.isidentifier():
        raise ConfigError(key, spec, "must read module:function or file.py:function", "add the name")
    modules = reached_from(place)
    if not modules:
        raise ConfigError(key, spec, f"{place} does not exist", "fix the module name or the path")
    _check_function(spec, modules[0], key)
    return modules


def reached_from(location: str) -> list[UserModule]:
    """Find the module at `location`, `file.py` or `package.module`, and the user modules that it imports, transitively;
    [] if the file does not exist.
    """
    from_file = location.endswith(".py")
    location = location if from_file else present_module(location)
    search = search_folders(Path(location) if from_file else None)
    path = Path(location) if from_file else find_module_file(location, search)
    if path is None or not path.is_file():
        return []
    name = "" if from_file else location
    first = UserModule(path.name if from_file else location, path, _source(path, name))
    found = {path.resolve(): first}
    # Importing a.b.c runs a and a.b before it.
    waiting = list(_own((*_parents(name), *first.source.imports), search))
    while waiting:
        name, imported = waiting.pop()
        if imported.resolve() in found:
            continue
        module = UserModule(name, imported, _source(imported, name))
        found[imported.resolve()] = module
        waiting += _own(module.source.imports, search)
    return [first, *sorted(list(found.values())[1:], key=lambda module: module.name)]


def digest_of(modules: Sequence[UserModule], *, key: str) -> str:
    """Digest of the code of `modules` and of their declared dependencies.

    Modules of ours whose code is unchanged keep their former digest.
    """
    digest = sha256_text(canonical_json(code_of(modules, key=key)))
    return FORMER_DIGESTS.get(digest, digest)


def code_of(modules: Sequence[UserModule], *, key: str) -> dict[str, str]:
    """Digests by module, file or variable. Raises ConfigError for a declared file that does not exist."""
    found: dict[str, str] = {}
    for module in modules:
        found[module.name] = module.source.digest
        for entry in module.source.declared:
            found[f"{module.name}: {entry}"] = _declared_digest(module, entry, key)
    return dict(sorted(found.items()))


def changed_code_error(key: str, name: str) -> ConfigError:
    """The error for a function or file that differs from the one in the stage's key."""
    rule = "its code, or what it depends on, has changed since the stage began, and the result would mix both versions"
    return ConfigError(key, name, rule, "run again to use the new version, or restore the old one to resume")


def _check_function(spec: str, module: UserModule, key: str) -> None:
    place, _, function = spec.rpartition(":")
    names = module.source.names
    if names is None:
        parse_source(module.path.read_bytes(), str(module.path))  # raises, with the problem
    elif not {function, "*"} & names and not binds_out_of_sight(parse_source(module.source.content, place)):
        remedy = nearest(function, module.source.functions)
        raise ConfigError(key, spec, f"{place} has no {function}", remedy)


# ---------------------------------------------------------------- where modules lie


def find_module_file(name: str, search: Sequence[Path]) -> Path | None:
    """Find the file of a module; None if it has none (a namespace package, a built-in module, a zip file)."""
    top, *rest = name.split(".")
    place = locate(top, search)
    for part in rest:
        place = in_folders(part, place.folders)
    return place.file


def locate(top: str, search: Sequence[Path]) -> Place:
    """Find the location of a module without dots, as an import finds it; `Place(None)` if nowhere."""
    if top in sys.builtin_module_names:
        return Place(None)
    place = in_folders(top, search)
    if place.file or place.folders:
        return place
    spec = by_finders(top, search)
    if spec is None:
        return Place(None)
    origin = Path(spec.origin) if spec.origin and Path(spec.origin).is_file() else None
    return Place(origin, tuple(Path(folder) for folder in spec.submodule_search_locations or ()))


def by_finders(top: str, search: Sequence[Path]) -> ModuleSpec | None:
    """Find a module in `search` and elsewhere with this process's finders: editable installs add finders.

    `importlib.util.find_spec` would also find modules next to files that were loaded before, and their imports.
    """
    folders = [str(folder.absolute()) for folder in search]  # Python remembers where "." was when it was first searched
    try:
        found = (finder.find_spec(top, folders) for finder in sys.meta_path)
        return next((spec for spec in found if spec is not None), None)
    except (ImportError, OSError, ValueError):
        return None


def in_folders(part: str, folders: Sequence[Path]) -> Place:
    """Find the module `part` in the first of the folders that has it."""
    spaces = []
    for folder in folders:
        package = folder / part / "__init__.py"
        if package.is_file():
            return Place(package, (package.parent,))
        for suffix in (*EXTENSION_SUFFIXES, ".py"):
            if (folder / f"{part}{suffix}").is_file():
                return Place(folder / f"{part}{suffix}")
        if (folder / part).is_dir():
            spaces.append(folder / part)
    return Place(None, tuple(spaces))


def _own(names: Sequence[str], search: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield name and file of the user modules among the imported `names`."""
    for name in names:
        if name.split(".")[0] not in PROGRAM_PACKAGES:
            path = find_module_file(name, search)
            if path is not None and is_users_own(path):
                yield name, path


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


# ---------------------------------------------------------------- what is in them


def _source(path: Path, name: str) -> UserSource:
    if path.suffix != ".py":
        return UserSource(file_digest(path), b"", (), (), None, ())
    # Read each time, and not known by its status: an edit may keep size and time.
    content = path.read_bytes()
    digest, imports, declared, names, functions = analysis_of(path, name, content, _analyse_code)
    bound = None if names is None else frozenset(names)
    return UserSource(digest, content, tuple(imports), tuple(declared), bound, tuple(functions))


def file_digest(path: Path) -> str:
    """Digest of a file, which is read again when its status has changed."""
    status = path.stat()
    return _hashed(path, (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(maxsize=8192)
def _hashed(path: Path, status: tuple[int, ...]) -> str:
    return hash_file(path)


def _analyse_code(path: Path, name: str, content: bytes) -> list[Any]:
    """Values of the fields of a `UserSource` except its content."""
    try:
        tree = parse_source(content, str(path))
        digest = digest_without_texts(tree) if is_ours(name) else _code_digest(content)
    except (ConfigError, ValueError, RecursionError, tokenize.TokenError):
        # Written for another Python: a file that cannot be parsed counts with all its bytes.
        return [hashlib.sha256(content).hexdigest(), [], [], None, []]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports = sorted(imported_names(ast.walk(tree), package) - {""})
    names = sorted(top_level_names(tree))
    return [digest, imports, list(_declared(tree, path)), names, functions_of(tree)]


def _code_digest(content: bytes) -> str:
    """Digest of the code that ignores comments and line layout."""
    tokens = tokenize.tokenize(io.BytesIO(content).readline)
    kept = [[token.type, "" if token.type in _SPACE else token.string] for token in tokens if token.type not in _LAYOUT]
    return sha256_text(canonical_json(kept))


# ---------------------------------------------------------------- what they declare


def _declared(tree: ast.Module, path: Path) -> tuple[str, ...]:
    """Parse the entries of `DEPENDS_ON`. Raises ConfigError if it is not one literal list of strings."""
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
        raise ConfigError(f"{path.name}: {DECLARATION}", f"line {bindings[0].lineno}", rule, example)
    return tuple(texts)


def _binds(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id == DECLARATION for target in targets)


def seen_files(modules: Sequence[UserModule]) -> list[Path]:
    """Files covered by a digest of `modules`: their own, and their declared files and folders."""
    declared = [
        module.path.parent / entry
        for module in modules
        for entry in module.source.declared
        if not entry.startswith(ENVIRONMENT)
    ]
    return [*(module.path for module in modules), *declared]


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
    raise ConfigError(key, module.path.name, rule, f"fix {DECLARATION}, or add the file")
