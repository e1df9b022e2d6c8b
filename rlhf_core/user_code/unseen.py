"""Name what a user's module reads or reaches beyond what its key sees, from its source alone, before it runs.

Found by the names that the code uses, so a hint: what it does when it runs is seen by `rlhf_core.user_code.watch`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from rlhf_core.store.fingerprint import parse_source
from rlhf_core.user_code.sources import (
    ENVIRONMENT,
    PROGRAM_PACKAGES,
    Place,
    UserModule,
    in_folders,
    is_users_own,
    locate,
)

FILES, VARIABLES = "reads files", "reads environment variables"
NOWHERE, UNDECLARED = "imports what is found nowhere", "names files that it does not declare"
MOST_CHARACTERS = 200
"""A file name has at most 255 bytes."""
USES = {
    "imports modules by a computed name": (
        *("__import__", "*.import_module", "*.spec_from_file_location", "*.SourceFileLoader", "*.load_module"),
        *("*.exec_module", "*.run_path", "*.run_module", "pkgutil.*", "pydoc.locate", "*.entry_points"),
    ),
    "changes where modules are found": (
        "sys.path",
        "sys.meta_path",
        "sys.path_hooks",
        "sys.modules",
        "site.addsitedir",
    ),
    "runs code from text": ("exec", "eval"),
    "starts programs": (
        *(
            "subprocess.*",
            "os.system",
            "os.popen",
            "os.exec*",
            "os.spawn*",
            "os.posix_spawn*",
            "pty.spawn",
            "pexpect.*",
        ),
        *("*.create_subprocess_exec", "*.create_subprocess_shell"),
    ),
    "loads libraries": ("ctypes.*", "cffi.*", "*.load_library", "*.CDLL"),
    "reaches the network": (
        *(
            "socket.*",
            "requests.*",
            "httpx.*",
            "urllib.request.*",
            "urllib3.*",
            "http.client.*",
            "aiohttp.*",
            "ftplib.*",
        ),
        *("openai.*", "anthropic.*", "litellm.*", "websockets.*", "grpc.*", "boto3.*", "huggingface_hub.*", "xmlrpc.*"),
        *("*.open_connection", "*.create_connection"),
    ),
    VARIABLES: ("*.environ", "*.environb", "*.getenv", "*.getenvb", "*.expandvars", "*.load_dotenv", "*.dotenv_values"),
    FILES: (
        *("open", "*.open", "*.open_code", "*.read", "*.read_*", "*.load", "*.load_*", "*.loadtxt", "*.imread"),
        *(
            "*.genfromtxt",
            "*.fromfile",
            "*.from_file",
            "*.from_pretrained",
            "*.memmap",
            "*.mmap",
            "*.safe_open",
            "*.scan_*",
        ),
        *("*.iterdir", "*.glob", "*.rglob", "*.iglob", "os.listdir", "os.scandir", "os.walk", "os.fdopen", "*.connect"),
        *(
            "*.readlines",
            "*.getline",
            "*.getlines",
            "fileinput.*",
            "importlib.resources.*",
            "*.unpack_archive",
            "sys.stdin",
        ),
        *("zipfile.ZipFile", "h5py.File", "pyarrow.parquet.*", "*.FileIO", "*.get_data", "io.open", "os.open"),
    ),
}
"""What code does -> patterns of the names by which it does so, with the modules that they come from."""


def unseen_uses(module: UserModule, own: frozenset[str], search: Sequence[Path]) -> list[str]:
    """Return phrases for what `module` reads, each by name and first line; `own` are top-level names of user modules.

    Files and variables of a module that declares some in `DEPENDS_ON` count as declared, but for files beside it that its
    text names.
    """
    if module.source.names is None:
        return []  # compiled, or not of this Python: nothing to read
    tree = _tree(module.source.content, module.path)
    files = [entry for entry in module.source.declared if not entry.startswith(ENVIRONMENT)]
    declares = {FILES: bool(files), VARIABLES: len(files) < len(module.source.declared)}
    places = [place for place in _uses(tree, own) if not declares.get(place[0], False)]
    places += [(NOWHERE, name, line) for name, line in _required(tree, module) if not _is_found(name, search)]
    places += [(UNDECLARED, name, line) for name, line in _named_files(tree, module, files)] if files else []
    found: dict[str, dict[str, int]] = {}
    for what, name, line in places:
        found.setdefault(what, {}).setdefault(name, line)
    listed = {what: "; ".join(f"{name}, line {line}" for name, line in names.items()) for what, names in found.items()}
    return [f"{module.path.name} {what} ({names})" for what, names in listed.items()]


@lru_cache(maxsize=1024)
def _tree(content: bytes, path: Path) -> ast.Module:
    return parse_source(content, str(path))


def _uses(tree: ast.Module, own: frozenset[str]) -> list[tuple[str, str, int]]:
    """Return what is done, the name that does it, and its line, in the order of the text."""
    origins = _origins(tree)
    mine = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    mine |= {name for name, origin in origins.items() if origin.split(".")[0] in own} | {"self", "cls"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            root, *rest = _parts(node)
            for what, shown in _meanings(".".join([origins.get(root, root), *rest])) if root not in mine else ():
                found.add((node.lineno, node.col_offset, what, shown))
    return [(what, name, line) for line, _, what, name in sorted(found)]


def _meanings(name: str) -> Iterator[tuple[str, str]]:
    """Yield what a use of `name` does, if it is one of `USES`, and the name to show."""
    for what, patterns in USES.items():
        for pattern in patterns:
            if fnmatchcase(name, pattern) and not name.endswith(".load_state_dict"):
                yield what, name.rpartition(".")[2] if pattern.startswith("*.") else name
                return


def _origins(tree: ast.Module) -> dict[str, str]:
    """Return name in the code -> dotted name of what was imported under it."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found |= {alias.asname: alias.name} if alias.asname else {top: top}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _parts(node: ast.expr) -> list[str]:
    """Return the parts of `a.b.c`; what has no name, such as the result of a call, is an empty part."""
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _required(tree: ast.Module, module: UserModule) -> Iterator[tuple[str, int]]:
    """Yield name and line of what must be a module for an import to succeed that is not for type checkers alone."""
    checks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _parts(node.test)[-1] == "TYPE_CHECKING"]
    unused = {id(inner) for check in checks for statement in check.body for inner in ast.walk(statement)}
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    for node in (node for node in ast.walk(tree) if id(node) not in unused):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or not node.level):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*above, node.module or ""]), node.lineno


def _is_found(name: str, search: Sequence[Path]) -> bool:
    top, *rest = name.split(".")
    if top in sys.stdlib_module_names or top in PROGRAM_PACKAGES:
        return True
    place = locate(top, search)
    while rest and (place.file is None or is_users_own(place.file)):
        place = in_folders(rest.pop(0), place.folders)
    return place != Place(None)


def _named_files(tree: ast.Module, module: UserModule, declared: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the texts that name a file beside the module which is neither declared nor inside a declared folder."""
    folder = module.path.parent
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            path = folder / node.value[:MOST_CHARACTERS]
            if path.is_file() and not any(path.is_relative_to(folder / entry) for entry in declared):
                yield node.value, node.lineno
