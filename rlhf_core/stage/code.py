"""Compute the digests of a stage's code: its module and all modules of this program that it imports."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError
from rlhf_core.moved import present_name
from rlhf_core.store.index import load_entries, save_entries
from rlhf_core.store.layout import cache_folder
from rlhf_core.user_code.sources import Place, in_folders, locate, search_folders
from rlhf_core.user_code.syntax import ANALYSES, OUR_PACKAGES, analysis_of, imported_names, parse_source
from rlhf_core.user_code.syntax_digest import digest_with_texts, digest_without_texts

PLUMBING = (
    "rlhf_core.errors",
    "rlhf_core.moved",
    "rlhf_core.schema.secrets",
    "rlhf_core.secrets",
    "rlhf_core.stage",
    "rlhf_core.store",
    "stages.declaration",
    "stages.measured",
)
"""Modules and packages that name things, store artifacts or declare stages, but never compute their content: a change there
changes no key.
"""

ALL_MODULES = ".__path__"
"""Suffix for the name of a package that imports all of its modules by looking them up with `pkgutil`."""

CODE = "code.json"
MOST_CODE = 2000
"""Number of modules whose analysis is kept, the latest used: a few times the modules of this program."""


def module_digests(module_name: str, packages: tuple[str, ...] = OUR_PACKAGES) -> dict[str, str]:
    """Hash the syntax tree of `module_name` and of every module of `packages` that it reaches, by name.

    Imports inside functions count, those for type checkers alone do not, and a package that uses its own `__path__`
    imports all of its modules. Comments and the modules of `PLUMBING` do not count, nor docstrings and messages of modules
    of `packages`. The modules are parsed, not imported.
    """
    found: dict[str, str] = {}
    search = search_folders(None)

    @cache
    def place(name: str) -> Place:
        package, _, last = name.rpartition(".")
        if package:
            return in_folders(last, place(package).folders)
        found, loaded = locate(name, search), getattr(sys.modules.get(name), "__path__", ())
        return Place(found.file, tuple(map(Path, loaded)) or found.folders)

    waiting = [module_name]
    while waiting:
        name = present_name(waiting.pop())
        if name in found or (name != module_name and _is_plumbing(name)):
            continue
        path = place(name).file
        if path is None or path.suffix != ".py":
            if name == module_name:
                raise ConfigError(
                    "module", name, "is not installed", "install the whole wheel, or name a module on the path"
                )
            continue
        analyse = _our_module if name.split(".")[0] in packages else _users_module
        digest, imports = analysis_of(path, name, path.read_bytes(), analyse)
        found[name] = digest
        for target in imports:
            if target.endswith(ALL_MODULES):  # of this module, which is a package
                waiting += [f"{name}.{file.stem}" for file in path.parent.glob("*.py") if file.stem != "__init__"]
            elif target.split(".")[0] in packages:
                waiting.append(target)
    return dict(sorted(found.items()))


@contextmanager
def remembered_code() -> Iterator[None]:
    """Reuse the analyses of code by earlier processes of this user, and save the analyses of this process.

    Unlike the indexes of a store, this one belongs to no store: most plans are made before a store exists.
    """
    try:
        file = cache_folder() / CODE
    except (ConfigError, OSError, RuntimeError):  # this user may not look there, or has no home
        yield
        return
    known = load_entries(file)
    ANALYSES.update({key: entry for key, entry in known.items() if key not in ANALYSES})
    yield
    entries = dict(list(ANALYSES.items())[-MOST_CODE:])
    if not entries.keys() <= known.keys():
        save_entries(file, entries)


# ---------------------------------------------------------------- private


def _is_plumbing(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in PLUMBING)


def _our_module(path: Path, name: str, content: bytes) -> list[Any]:
    tree = parse_source(content, str(path))
    imports = _imports(tree, path, name)
    return [digest_without_texts(tree), imports]


def _users_module(path: Path, name: str, content: bytes) -> list[Any]:
    tree = parse_source(content, str(path))
    return [digest_with_texts(tree), _imports(tree, path, name)]


def _imports(tree: ast.Module, path: Path, name: str) -> list[str]:
    """The import statements of a module that run, in order."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    nodes = list(ast.walk(tree))
    imports = imported_names(_nodes_that_run(tree), package)
    if any(isinstance(node, ast.Name) and node.id == "__path__" for node in nodes):
        imports.add(package + ALL_MODULES)
    return sorted(imports)


def _nodes_that_run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree except those below `if TYPE_CHECKING`, whose imports only a type checker reads."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for other in child.orelse:
                yield from _nodes_that_run(other)
        else:
            yield from _nodes_that_run(child)
