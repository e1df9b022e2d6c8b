"""Find the files that a stage reads, and check that they match the digests in its key."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from glob import has_magic
from pathlib import Path

from rlhf_core.data.file_types import source_files
from rlhf_core.errors import RlhfError
from rlhf_core.store.fingerprint import list_files


@contextmanager
def read_as_planned(
    files: Mapping[str, tuple[str, Path]],
    digests: Callable[[], Mapping[str, str]],
    planned: Mapping[str, str],
    error: type[RlhfError],
) -> Iterator[None]:
    """Raise `error` unless the files read inside the block match the digests in the key, `planned`.

    `files` maps a name to the option and the path of a file, folder or pattern. `digests` hashes them again on entry. A
    file that is neither replaced nor written to afterwards is the hashed one.
    """
    before = {name: _statuses(path) for name, (_, path) in files.items()}
    found = digests()
    for name, (key, path) in files.items():
        if name in planned and planned[name] != found[name]:
            rule, remedy = "has changed since the run was planned", "run again: the new content gets its own key"
            raise error(key, str(path), rule, remedy)
    try:
        yield
    finally:  # also where reading failed: a file that changed under it is the reason
        for name, (key, path) in files.items():
            if _statuses(path) != before[name]:
                rule, remedy = "changed while it was read", "run again when no other process writes to it"
                raise error(key, str(path), rule, remedy)


def files_at(path: Path) -> tuple[Path, list[str]]:
    """Split `path` into a folder and the names of its files in it; `path` is a file, a folder or a pattern.

    Compiled Python in a folder, which differs between machines, does not count.
    """
    if path.is_file():
        return path.parent, [path.name]
    if path.is_dir():
        return path, [name for name in list_files(path) if "__pycache__" not in name.split("/")]
    folder = next(parent for parent in path.parents if not has_magic(str(parent)))
    return folder, [one.relative_to(folder).as_posix() for one in matching(path)]


def matching(path: Path) -> list[Path]:
    """Files that match a pattern; none if `path` is a file or a folder."""
    return [] if path.exists() else [one for one in source_files(str(path)) if one.is_file()]


def _statuses(path: Path) -> dict[str, tuple[int, ...]]:
    """Stamps that change with every write to a file, or to a file of a folder or pattern; empty if it was removed."""
    folder, names = files_at(path)
    found = {name: (folder / name).stat() for name in names if (folder / name).exists()}
    return {
        name: (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for name, status in found.items()
    }
