"""Watch what user code opens, imports, connects to and starts while it runs, and note what its stage's key does not see.

The interpreter itself calls an audit hook (PEP 578), so what libraries do for the user's code is seen too. Environment
variables are not, nor files that libraries open without Python (Arrow, HDF5, safetensors).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.util import source_from_cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from rlhf_core.secrets.redaction import without_secrets
from rlhf_core.user_code.sources import PROGRAM_PACKAGES, installed_folders

MARK = "__watch__"
"""Name of a `Watch` among the builtins of user modules, by which a stack is known to run the user's code."""
MOST_NOTES = 100
"""Of one process: a function may read another file for every answer."""
_MOST_NAMES = 100_000
_SYSTEM = ("/proc", "/sys", "/dev", "/etc", "/lib", "/lib64", "/run", "/usr/lib", "/usr/lib64", "/usr/share")


class Watch:
    """Adds a line to `file` for each thing that user code reads or reaches outside of `seen`: what is in the key.

    Left out are files of the interpreter, of installed packages, of this program, of the system and of the store in which
    `file` lies, files that this process has written, and temporary ones that are younger than the watch.
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
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(f"{json.dumps(without_secrets(text))}\n")


def noted(file: Path) -> tuple[str, ...]:
    """Return the notes of all processes of a stage, sorted; a line cut short by a kill is left out."""
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
"""Audit event -> what it means for a watch. https://docs.python.org/3/library/audit_events.html"""
_watches: list[Watch] = []
_whole_process: list[Watch] = []


def watch_process() -> None:
    """Watch what this process does from now on in threads of libraries too: it runs nothing but user code."""
    _whole_process[:] = _watches[-1:]


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        try:
            watch = _watch_of(sys._getframe(1))
            if watch is not None:
                _EVENTS[event](watch, *arguments)
        except Exception:  # an error here would be one of the user's code, and this is only a note
            return


def _watch_of(frame: FrameType | None) -> Watch | None:
    """Return the watch of the innermost user module on the stack, or that of the whole process."""
    while frame is not None:
        watch: Watch | None = frame.f_builtins.get(MARK)
        if watch is not None:
            return watch
        frame = frame.f_back
    return _whole_process[0] if _whole_process else None


def _not_the_users() -> set[Path]:
    """Return the folders of the interpreter, of this program and of the system."""
    program = Path(__file__).resolve().parents[2]
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    parts = ("bin", "etc", "include", "lib", "lib64", "share")
    folders = [Path(prefix, part) for prefix in prefixes for part in parts] + [*installed_folders()]
    found = [*folders, *(program / name for name in PROGRAM_PACKAGES)]
    return {path.resolve() for path in found} | {Path(path) for path in _SYSTEM}


def _source_of(path: Path) -> Path:
    """Return the source file of byte code, which Python opens instead of it."""
    return Path(source_from_cache(path)) if path.suffix == ".pyc" and path.parent.name == "__pycache__" else path


def _text(value: Any) -> str:
    return os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else str(value)
