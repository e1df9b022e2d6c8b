"""The paths of a store, and crash-safe writes: a crash at any instant leaves the old file or the new, never half."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError, ConfigError, DiskFullError
from rlhf_core.processes.identity import here, is_running
from rlhf_core.store.fingerprint import list_files, sha256_text
from rlhf_core.store.sharing import is_shared

SCHEMA = 2
"""Version of the store's folder layout and file formats that this code writes."""
MARKER = "store.json"
MANIFEST = "manifest.json"
CHECKPOINTS = "ckpt"
"""Name of the checkpoint folder inside a work folder."""
_FULL = (errno.ENOSPC, errno.EDQUOT)  # the quota of a user is a full disk, too
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
_HARDLY_ANY_BYTES = 1 << 20  # less free space than this means that the disk was full when the write failed
_LONGEST_NAME = 255
"""Largest number of characters in a file name on any file system."""
_DURABLE: set[Path] = set()
"""Folders that this process knows to be on the disk."""


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The paths of a store.

    >>> StoreLayout(Path("/s")).object("ab" + "0" * 62).parent.as_posix()
    '/s/objects/ab'
    """

    root: Path

    def object(self, digest: str) -> Path:
        """The folder of an immutable object."""
        return self.objects / digest[:2] / digest

    def attempt(self, key: str) -> Path:
        """The folder of the attempts at a key: checkpoints, unfinished output, metrics."""
        return self.attempts / key

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    @property
    def index(self) -> Path:
        """The folder of the cache that is derived from the rest of the store and may be deleted at any time."""
        return self.root / "index"


def is_inside(name: str) -> bool:
    """Whether a name in a manifest is a valid path of a file inside its folder."""
    parts = name.split("/")
    return (
        "\0" not in name
        and _has_utf8(name)
        and not {"", ".", ".."} & set(parts)
        and max(map(len, parts)) <= _LONGEST_NAME
    )


def _has_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


def object_of(uri: str) -> str:
    """Digest of the object that a `store://` uri belongs to; a digest or a key is returned unchanged."""
    return uri.removeprefix("store://").partition("/")[0]


# ---------------------------------------------------------------- which version wrote it


def check_schema(root: Path) -> None:
    """Raise ArtifactError if a newer version wrote the store in `root`, or this user cannot read it, or it is a file.

    A store without a marker has schema 1.
    """
    marker = root / MARKER
    with naming_disk_errors(root):
        if root.is_file():
            raise ArtifactError("store", str(root), "is a file", "name a folder")
        stored = read_json(marker)
        schema = 1 if stored is None and not marker.exists() else (stored or {}).get("schema")
    if not isinstance(schema, int):
        remedy = f"delete {marker} if this version wrote the store: it is written again"
        raise ArtifactError(f"store = {root}: the file {MARKER} in it cannot be read; {remedy}")
    if schema > SCHEMA:
        rule = f"was written by a newer version (schema {schema}, this one knows {SCHEMA})"
        raise ArtifactError(f"store = {root}: {rule}; upgrade, or choose another folder with RLHF_HOME or `store`")


def mark_schema(root: Path) -> None:
    """Create the folder of a store and write its schema marker, so that older programs refuse to change it."""
    stored = read_json(root / MARKER) or {}
    if "schema" not in stored or stored["schema"] < SCHEMA:
        write_json(root / MARKER, stored | {"schema": SCHEMA})


# ---------------------------------------------------------------- durable writes


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = True) -> None:
    """Replace the file atomically by the JSON of `value`; `durable` waits until it is on disk."""
    write_text(path, json.dumps(value, indent=1, sort_keys=True), durable=durable)


def cache_folder() -> Path:
    """The folder of this user's caches on this machine. Raises ConfigError if `RLHF_CACHE` cannot be one."""
    given = os.environ.get("RLHF_CACHE", "~/.cache/rlhf")
    folder = Path(given).expanduser().absolute()
    file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    if file or not given:
        rule = f"{file} is a file" if given else "is empty"
        raise ConfigError("RLHF_CACHE", given, rule, "name a folder, or unset it for ~/.cache/rlhf")
    return folder


def write_text(path: Path, text: str, *, durable: bool) -> None:
    """Replace the file atomically by `text`; `durable` waits until it is on disk."""
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(
    path: Path, content: bytes, *, durable: bool, put: Callable[[Path, Path], object] = Path.replace
) -> None:
    """Write a file next to `path`, which `put` renames, atomically; `durable` waits until it is on disk."""
    if durable:
        make_folder(path.parent)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        put(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_path(path.parent)


def temporary_for(path: Path) -> Path:
    """Choose a name next to `path`, which `sweep_temporaries` removes after this process was killed."""
    return path.with_name(f".{path.name}.{_place()}-{os.getpid()}-{secrets.token_hex(3)}")


def sweep_temporaries(root: Path) -> list[Path]:
    """Remove the temporary files below `root` of this machine's processes that were killed while they had them."""
    left, swept = re.compile(rf"\..*\.{_place()}-(\d+)-[0-9a-f]{{6}}"), []
    for path in walk(root):
        found = left.fullmatch(path.name)
        if found is not None and not is_running(int(found[1])):
            remove_tree(path)
            swept.append(path)
    return swept


def walk(root: Path) -> Iterator[Path]:
    """Yield the files and folders below `root`. Unlike `rglob`, pass over a folder that others remove meanwhile."""
    for parent, folders, names in os.walk(root):
        yield from (Path(parent, name) for name in (*folders, *names))


def _place() -> str:
    return sha256_text(" ".join(here()))[:8]


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably; the folder may exist already.

    Another process may have created it and not yet come to the fsync: each process does its own, once a folder.
    """
    if folder == folder.parent or (folder in _DURABLE and folder.is_dir()):
        return
    make_folder(folder.parent)
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
    with suppress(PermissionError):  # a folder far above the store
        fsync_path(folder.parent)
    _DURABLE.add(folder)


def read_json(path: Path) -> dict[str, Any] | None:
    """Load the table in a JSON file; None if the file does not exist or does not hold a table.

    Other read errors (an unreachable network drive, no permission) are independent of the content and are raised.
    Raises ArtifactError if it is no regular file.
    """
    try:
        value = json.loads(read_regular(path))
    except NotRegular as error:
        raise ArtifactError("file", str(path), str(error), "move it away") from None
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):  # the last: nested too deep
        return None
    return value if isinstance(value, dict) else None


class NotRegular(OSError):
    """A path of a file is a folder, a pipe, a device, a socket, or a link to itself."""


def read_regular(path: Path) -> str:
    """Read the text of a regular file in UTF-8. Raises NotRegular for other files, which may never end."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegular("is a link to itself") from None
        raise
    if not stat.S_ISREG(mode):
        raise NotRegular("is a folder" if stat.S_ISDIR(mode) else "is a pipe, a device or a socket, not a file")
    return path.read_text(encoding="utf-8")


def fsync_path(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until every file and folder below `folder`, and `folder` itself, is on disk."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fsync_path, [folder / path for path in list_files(folder)]))
    for parent, _, _ in os.walk(folder):
        fsync_path(Path(parent))


# ---------------------------------------------------------------- permissions and removal


def make_read_only(folder: Path) -> None:
    """Remove the write permission from a folder and everything in it; from the files alone in a shared store."""
    for parent, _, names in os.walk(folder, topdown=False):
        shared = is_shared(Path(parent))
        folders = () if shared else (Path(parent),)
        for path in (*(Path(parent, name) for name in names), *folders):
            with suppress(PermissionError) if shared else nullcontext():  # another user's, whose attempt we finished
                path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def remove_tree(folder: Path) -> None:
    """Remove a file or a folder, even a read-only one; it may not exist.

    Raises ArtifactError for files that this user may not remove.
    """
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    try:
        for parent, _, _ in os.walk(folder):
            _allow_writing(Path(parent))
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            with suppress(FileNotFoundError):  # another process is removing it, too
                shutil.rmtree(folder)
    except PermissionError as error:  # in a shared store, files that only another user may remove
        rule = f"{error.filename} in it cannot be removed ({error.strerror})"
        raise ArtifactError("folder", str(folder), rule, "let its owner or root remove the folder") from error


def move(path: Path, target: Path) -> None:
    """Rename a file or folder, or copy it if `target` is on another disk; `target` is never incomplete.

    Like `Path.rename`, it does not replace a folder that is not empty.
    """
    try:
        path.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy_over(path, target)


def _copy_over(path: Path, target: Path) -> None:
    temporary = temporary_for(target)
    try:
        if path.is_dir():
            shutil.copytree(path, temporary)
            fsync_tree(temporary)
        else:
            shutil.copy2(path, temporary)
            fsync_path(temporary)
        temporary.rename(target)
    except BaseException:
        remove_tree(temporary)
        raise
    remove_tree(path)


def move_aside(path: Path, quarantine: Path) -> Path | None:
    """Move a damaged file or folder into `quarantine` and return its new path; None if it has been moved already."""
    quarantine.mkdir(parents=True, exist_ok=True)
    target = quarantine / f"{path.stem}.{secrets.token_hex(4)}{path.suffix}"
    try:
        if path.is_dir():
            _allow_writing(path)
        move(path, target)
    except FileNotFoundError:
        return None
    os.utime(target)
    return target


def folder_bytes(folder: Path) -> int:
    """Count the bytes in the files below `folder`."""
    return sum((folder / path).lstat().st_size for path in list_files(folder))


def _allow_writing(folder: Path) -> None:
    # Without write permission a folder cannot be emptied, and only root can move it.
    if not os.access(folder, os.W_OK | os.X_OK):  # in a shared store it may be another user's, and is writable
        with suppress(FileNotFoundError):  # another process is removing it, too
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o700)


# ---------------------------------------------------------------- a disk that is full, or not ours to write to


@contextmanager
def naming_disk_errors(root: Path) -> Iterator[None]:
    """Turn the error of a full or unwritable disk into an ArtifactError with the remedy.

    Only a permission error at a path below `root` counts; a full disk is detected from any error. Without permission, or
    on a disk that is mounted read-only, the remedy is another folder.
    """
    try:
        yield
    except ArtifactError:
        raise
    except Exception as error:
        if disk_is_full(error, root):
            raise disk_full(root) from error
        if isinstance(error, OSError) and error.errno in FORBIDDEN and _is_below(error.filename, root):
            rule = f"cannot be written to ({error.strerror}: {error.filename})"
            remedy = "change the permissions, or choose another folder: set `store` in the profile, or RLHF_HOME"
            raise ArtifactError("store", str(root), rule, remedy) from error
        raise


def _is_below(name: object, root: Path) -> bool:
    return isinstance(name, (str, os.PathLike)) and Path(name).absolute().is_relative_to(root)


def disk_full(root: Path) -> DiskFullError:
    """The error for a full disk."""
    remedy = "free space, or move it: set `store` in the profile, or RLHF_HOME; nothing was lost, run the same command again to resume"
    return DiskFullError("store", str(root), "the disk is full", remedy)


def disk_is_full(error: BaseException, root: Path) -> bool:
    """Whether `error` came from a full disk. Libraries often hide the errno, so text and free space count."""
    cause: BaseException | None = error
    while cause is not None:
        if (isinstance(cause, OSError) and cause.errno in _FULL) or "No space left on device" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    try:
        space = os.statvfs(root)
    except OSError:  # not there yet, or closed to this user
        return False
    return space.f_bavail * space.f_frsize < _HARDLY_ANY_BYTES
