"""Hash values, files and folders."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError, ConfigError

_HASH_THREADS = 16


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
    """Serialize `value` as canonical JSON: keys sorted, no spaces, floats by `repr`, tuples as lists.

    Raises ConfigError, naming the place in `value`, for values without a stable text: callables, sets, paths,
    objects, NaN and infinity.

    >>> canonical_json({"b": (1, 2.5), "a": None})
    '{"a":null,"b":[1,2.5]}'
    """
    return json.dumps(_plain(value, ""), sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_text(text: str) -> str:
    """Hash `text` in UTF-8 with sha256, as 64 hexadecimal digits."""
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
    """Hash the file's content with sha256, as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_files(folder: Path) -> tuple[str, ...]:
    """List the sorted posix paths, relative to `folder`, of all files below it; empty folders do not count.

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
    """Size and sha256 of every file below `folder` by relative posix path; files are hashed in threads."""
    return hash_files(folder, list_files(folder))


def regular_status(path: Path) -> os.stat_result:
    """Read the status of a file. Raises ArtifactError if it is not regular, such as a pipe, which may never end."""
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
    """Size and sha256 of the given relative `paths` below `folder`, by path."""

    ordered = sorted(paths)
    sizes = {path: regular_status(folder / path).st_size for path in ordered}

    def entry(path: str) -> FileEntry:
        return FileEntry(size=sizes[path], sha256=hash_file(folder / path))

    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return dict(zip(ordered, pool.map(entry, ordered), strict=True))


def tree_digest(files: Mapping[str, FileEntry], under: str = "") -> str:
    """Hash names and contents of the files below the folder `under` with sha256, without the folder's own name.

    A folder inside an object has the same digest as the same folder alone, so a stage that reads only that folder
    does not run again when its neighbors change.
    """
    prefix = f"{under.rstrip('/')}/" if under else ""
    inside = {path[len(prefix) :]: entry.sha256 for path, entry in files.items() if path.startswith(prefix)}
    return sha256_text(canonical_json(inside))
