"""Record the files, imports, connections and processes of running user code that are not in its stage's key.

The interpreter itself calls an audit hook (PEP 578), so actions of libraries for the user's code are seen too.
Environment variables are not, nor files that libraries open without Python (Arrow, HDF5, safetensors).

Before it runs, `unseen_uses` lists from the source of a module the reads and connections that it may make. It looks for
names that the code uses, so the list is only a hint.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.util import source_from_cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from rlhf_core.processes.installed import installed_folders, is_users_own
from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.user_code.sources import (
    ENVIRONMENT,
    PROGRAM_PACKAGES,
    Place,
    UserModule,
    in_folders,
    locate,
)
from rlhf_core.user_code.syntax import parse_source

logger = logging.getLogger(__name__)

MARK = "__watch__"
"""Name of a `Watch` among the builtins of user modules, by which a stack is known to run the user's code."""
MOST_NOTES = 100
"""Of one process: a function may read another file for every answer."""
_MOST_NAMES = 100_000  # that are remembered, so that a loop over files fills no memory
_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/lib", "/lib64", "/run", "/usr/lib", "/usr/lib64", "/usr/share")


class Watch:
    """Adds a line to `file` for each read or connection of user code outside of `seen`, the content of the key.

    Left out are files of the interpreter, of installed packages, of this program, of the system and of the store in which
    `file` lies, files that this process has written, and temporary files younger than the watch.
    """

    def __init__(self, file: Path, seen: Iterable[Path]) -> None:
        store = [folder.parent for folder in file.parents if folder.name == "attempts"]
        self._file = file.resolve()
        self._left_out = (*(path.resolve() for path in (*seen, *store)), *_not_the_users())
        self._temporary = Path(tempfile.gettempdir()).resolve()
        self._began_ns = time.time_ns()
        self._names: set[str] = set()
        self._notes: set[str] = set()
        self._looked_up: set[str] = set()
        if not _watches:
            sys.addaudithook(_hook)
        _watches.append(self)

    def opened(self, path: Any, mode: Any = None, flags: Any = 0) -> None:
        """Note a file that is opened to be read."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        name = str(Path(os.fsdecode(path)).absolute())
        if name in self._names:
            return
        if len(self._names) < _MOST_NAMES:
            self._names.add(name)
        written = isinstance(flags, int) and flags & (os.O_CREAT | os.O_TRUNC)
        if not written and self._counts(read := _source_of(Path(name).resolve())):
            self._note(f"reads {read}")

    def imported(self, module: str, file: Any, *_: Any) -> None:
        """Note a compiled module; the files of others are opened."""
        self.opened(file)

    def looked_up(self, host: Any, port: Any = "", *_: Any) -> None:
        """Note a host by its name; its addresses change."""
        if host:
            self._looked_up.add(str(port))
            self._note(f"connects to {_text(host)}:{_text(port)}".rstrip(":"))

    def connected(self, connection: Any, address: Any) -> None:
        """Note an address, unless the name of a host was looked up for its port."""
        if not isinstance(address, tuple):
            self._note(f"connects to {_text(address)}")
        elif str(address[1]) not in self._looked_up:
            self._note(f"connects to {address[0]}:{address[1]}")

    def started(self, program: Any, arguments: Any = (), *_: Any) -> None:
        """Note a program, without its arguments: they may hold secrets."""
        first = arguments[0] if isinstance(arguments, (list, tuple)) and arguments else arguments
        self._note(f"starts {(_text(program or first).split() or ['a program'])[0]}")

    def _counts(self, path: Path) -> bool:
        if any(map(path.is_relative_to, self._left_out)) or {"site-packages", "dist-packages"} & set(path.parts):
            return False
        young = path.is_relative_to(self._temporary) and path.stat().st_ctime_ns >= self._began_ns
        return path.is_file() and not young

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < MOST_NOTES:
            self._notes.add(text)
            if not self._file.parent.is_dir():
                logger.warning("%s; not in the record, since the stage works on another machine", without_secrets(text))
                return
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(f"{json.dumps(without_secrets(text))}\n")


def noted(file: Path) -> tuple[str, ...]:
    """Load the notes of all processes of a stage, sorted; a line cut short by a kill is left out."""
    found = set()
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        try:
            found.add(str(json.loads(line)))
        except ValueError:
            continue
    return tuple(sorted(found))


# ---------------------------------------------------------------- the hook

_EVENTS: Mapping[str, Callable[..., None]] = MappingProxyType(
    {
        "open": Watch.opened,
        "import": Watch.imported,
        "ctypes.dlopen": Watch.opened,
        "sqlite3.connect": Watch.opened,
        "socket.getaddrinfo": Watch.looked_up,
        "socket.gethostbyname": Watch.looked_up,
        "socket.connect": Watch.connected,
        "subprocess.Popen": Watch.started,
        "os.system": Watch.started,
        "os.exec": Watch.started,
        "os.posix_spawn": Watch.started,
        "os.spawn": lambda watch, mode, path, *others: watch.started(path),
    }
)
"""Audit event -> its meaning for a watch. https://docs.python.org/3/library/audit_events.html"""
_watches: list[Watch] = []
_whole_process: list[Watch] = []


def watch_process() -> None:
    """Watch this process from now on, including threads of libraries: it runs only user code."""
    _whole_process[:] = _watches[-1:]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        try:
            watch = _watch_of(sys._getframe(1))
            if watch is not None:
                _EVENTS[event](watch, *arguments)
        except Exception:  # an error here would count as the user's, and this is only a note
            return


def _watch_of(frame: FrameType | None) -> Watch | None:
    """The watch of the innermost user module on the stack, or else of the whole process."""
    while frame is not None:
        watch: Watch | None = frame.f_builtins.get(MARK)
        if watch is not None:
            return watch
        frame = frame.f_back
    return _whole_process[0] if _whole_process else None


def _not_the_users() -> set[Path]:
    """Folders of the interpreter, of this program and of the system."""
    program = Path(__file__).resolve().parents[2]
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    parts = ("bin", "etc", "include", "lib", "lib64", "share")
    folders = [Path(prefix, part) for prefix in prefixes for part in parts] + [*installed_folders()]
    found = [*folders, *(program / name for name in PROGRAM_PACKAGES)]
    return {path.resolve() for path in found} | {Path(path) for path in _SYSTEM}


def _source_of(path: Path) -> Path:
    """The source file of byte code, which Python opens instead of it."""
    return Path(source_from_cache(path)) if path.suffix == ".pyc" and path.parent.name == "__pycache__" else path


def _text(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else str(value)


# ---------------------------------------------------------------- unseen

FILES, VARIABLES = "reads files", "reads environment variables"
NOWHERE, UNDECLARED = "imports what is found nowhere", "names files that it does not declare"
MOST_CHARACTERS = 200
"""A file name has at most 255 bytes."""
USES = {
    "imports modules by a computed name": (
        "__import__ *.import_module *.spec_from_file_location *.SourceFileLoader *.load_module *.exec_module "
        "*.run_path *.run_module pkgutil.* pydoc.locate *.entry_points"
    ),
    "changes where modules are found": "sys.path sys.meta_path sys.path_hooks sys.modules site.addsitedir",
    "runs code from text": "exec eval",
    "starts programs": (
        "subprocess.* os.system os.popen os.exec* os.spawn* os.posix_spawn* pty.spawn pexpect.* "
        "*.create_subprocess_exec *.create_subprocess_shell"
    ),
    "loads libraries": "ctypes.* cffi.* *.load_library *.CDLL",
    "reaches the network": (
        "socket.* requests.* httpx.* urllib.request.* urllib3.* http.client.* aiohttp.* ftplib.* openai.* "
        "anthropic.* litellm.* websockets.* grpc.* boto3.* huggingface_hub.* xmlrpc.* *.open_connection "
        "*.create_connection"
    ),
    VARIABLES: "*.environ *.environb *.getenv *.getenvb *.expandvars *.load_dotenv *.dotenv_values",
    FILES: (
        "open *.open *.open_code *.read *.read_* *.load *.load_* *.loadtxt *.imread *.genfromtxt *.fromfile "
        "*.from_file *.from_pretrained *.memmap *.mmap *.safe_open *.scan_* *.iterdir *.glob *.rglob *.iglob "
        "os.listdir os.scandir os.walk os.fdopen *.connect *.readlines *.getline *.getlines fileinput.* "
        "importlib.resources.* *.unpack_archive sys.stdin zipfile.ZipFile h5py.File pyarrow.parquet.* "
        "*.FileIO *.get_data io.open os.open"
    ),
}
"""Action of code -> patterns of the names that perform it, with their modules, separated by spaces."""


def unseen_uses(module: UserModule, own: frozenset[str], search: Sequence[Path]) -> list[str]:
    """Describe the reads of `module`, each by name and first line; `own` are top-level names of user modules.

    If a module declares some in `DEPENDS_ON`, its files and variables count as declared, except for files next to it
    that its text names.
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
    """Find each action, the name that performs it, and its line, in the order of the text."""
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
    """Yield the action of `name`, if `USES` has it, and the name to show."""
    for what, patterns in USES.items():
        for pattern in patterns.split():
            if fnmatchcase(name, pattern) and not name.endswith(".load_state_dict"):
                yield what, name.rpartition(".")[2] if pattern.startswith("*.") else name
                return


def _origins(tree: ast.Module) -> dict[str, str]:
    """Map each name in the code to the dotted name of its import."""
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
    """Split `a.b.c`; a part without a name, such as a call, is empty."""
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    return [node.id] if isinstance(node, ast.Name) else [""]


def _required(tree: ast.Module, module: UserModule) -> Iterator[tuple[str, int]]:
    """Yield name and line of each module that must exist at run time for the imports to succeed."""
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
    """Yield the texts that name a file next to the module that is neither declared nor inside a declared folder."""
    folder = module.path.parent
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isprintable():
            path = folder / node.value[:MOST_CHARACTERS]
            if path.is_file() and not any(path.is_relative_to(folder / entry) for entry in declared):
                yield node.value, node.lineno
