"""The manifest of an object: a list of its files, against which the folder is checked.

The modification time of a manifest is the time of the last good check: it is written when the object is hashed, and touched
when it is hashed again. Only files that were written to since then need another look.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rlhf_core.store.fingerprint import FileEntry, hash_files, list_files, tree_digest
from rlhf_core.store.layout import MANIFEST, is_inside, read_json, write_json


def write_manifest(folder: Path, files: Mapping[str, FileEntry]) -> None:
    """List the files of an object in its folder."""
    write_json(folder / MANIFEST, {"schema": 1, "files": {path: asdict(entry) for path, entry in files.items()}})


def object_damage(folder: Path, *, deep: bool) -> str:
    """Describe the damage of an object, "" if it has none.

    `deep` hashes all files; otherwise sizes are compared, and only files written to since the last good check are
    hashed.
    """
    manifest = read_json(folder / MANIFEST)
    if manifest is None:
        return f"{folder} is gone" if not folder.exists() else f"{folder} has no readable {MANIFEST}"
    try:
        files = {path: FileEntry(int(item["size"]), str(item["sha256"])) for path, item in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return f"{folder} has no readable {MANIFEST}"
    if not all(map(is_inside, files)):
        return f"{folder} has no readable {MANIFEST}"
    written = []
    try:
        checked = (folder / MANIFEST).stat().st_mtime_ns
        for path, entry in files.items():
            status = (folder / path).stat()
            if status.st_size != entry.size:
                return f"{path} has {status.st_size} bytes, not {entry.size}"
            if status.st_mtime_ns > checked:
                written.append(path)
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is missing"
    found = hash_files(folder, files if deep else written)
    changed = [path for path, entry in found.items() if files[path] != entry]
    if changed:
        return f"{changed[0]} has other content"
    return _list_damage(folder, files) if deep else ""


def _list_damage(folder: Path, files: Mapping[str, FileEntry]) -> str:
    """A file that the manifest does not list, or a manifest of another object."""
    extra = sorted(set(list_files(folder)) - set(files) - {MANIFEST})
    if extra:
        return f"{extra[0]} is not listed in it"
    return "" if tree_digest(files) == folder.name else f"its {MANIFEST} does not match its digest"
