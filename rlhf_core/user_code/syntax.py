"""Read the syntax tree of a module: its imports and the names that it defines. Each content is analyzed once."""

import ast
import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError

OUR_PACKAGES = ("stages", "rlhf_core", "rlhf_contrib")

ANALYSES: dict[str, list[Any]] = {}
"""Digest of a module's name and content -> the analysis of its code, in the order of last use.

`rlhf_core.stage.code` keeps it between processes, because to parse code is the slowest part of a plan.
"""


def analysis_of(path: Path, name: str, content: bytes, analyse: Callable[[Path, str, bytes], list[Any]]) -> list[Any]:
    """Analysis of a module as JSON values: `analyse(path, name, content)`, unless this content was analysed before.

    `analyse` may use the path only to see whether the module is a package. The cache key includes the analyzing code,
    since earlier versions of it may have computed other digests.
    """
    given = f"{_analyser(analyse.__code__.co_filename)} {analyse.__qualname__} {name} {path.name == '__init__.py'}\n".encode()
    key = hashlib.sha256(given + content).hexdigest()
    found = ANALYSES.pop(key, None) or analyse(path, name, content)
    ANALYSES[key] = found
    return found


@lru_cache
def _analyser(file: str) -> str:
    """Digest of the module that analyses and of the modules in this folder that it uses."""
    files = (file, __file__, Path(__file__).with_name("syntax_digest.py"))
    return hashlib.sha256(b"\n".join(Path(each).read_bytes() for each in files)).hexdigest()


def parse_source(source: bytes, path: str) -> ast.Module:
    try:
        return ast.parse(source, filename=path)
    except SystemError:  # CPython 3.11 shares one parser depth counter between threads; a second try is right
        return parse_source(source, path)
    except SyntaxError as error:
        raise ConfigError("module", path, f"is not valid Python ({error})", "fix the file") from error


def imported_names(nodes: Iterable[ast.AST], package: str) -> set[str]:
    """Names of the modules that the nodes of a tree may import, and of the packages that contain them."""
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
    """Names that a module binds outside of functions and classes, also inside `if` and `try`."""
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


_BINDS = {"globals", "locals", "vars", "setattr", "__dict__", "modules", "exec", "update_wrapper"}


def binds_out_of_sight(tree: ast.Module) -> bool:
    """True if a module may bind or change names in ways that its syntax does not show, such as `globals()["f"] = g`."""
    nodes = ast.walk(tree)
    return any(getattr(node, "attr", getattr(node, "id", getattr(node, "name", ""))) in _BINDS for node in nodes)
