"""Check an object of the store against its manifest.

Record which objects were found damaged, and find the results that may have been computed from them.

Bytes that have gone bad on a disk stay bad, so everything read before a good check was right. The modification time of
an object's manifest is the time of its last good check: the manifest is written when the object is hashed, and touched
when it is hashed again. Each finding of damage is kept forever under `roots/damaged` with an id, and an attempt records
the ids that were known when it began. A result is suspect if one of its inputs was found damaged and the attempt did
not know of it, unless it finished before the last good check.

Results computed from a suspect result need no rule: if that result comes out differently now, their key changes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.store.fingerprint import FileEntry, hash_files, list_files, tree_digest
from rlhf_core.store.layout import MANIFEST, StoreLayout, move_aside, read_json, write_json
from rlhf_core.types import encodable

_LONGEST_NAME = 255
"""Largest number of characters in a file name on any file system."""


def object_damage(folder: Path, *, deep: bool) -> str:
    """Return the damage of an object, or "".

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
    if not all(map(_is_inside, files)):
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
    return _content_damage(folder, files) if deep else _changed_content(folder, files, written)


def _is_inside(name: str) -> bool:
    """Return whether a name in a manifest is a valid path of a file inside its object."""
    parts = name.split("/")
    return (
        "\0" not in name
        and name == encodable(name)
        and not {"", ".", ".."} & set(parts)
        and max(map(len, parts)) <= _LONGEST_NAME
    )


def _changed_content(folder: Path, files: Mapping[str, FileEntry], paths: Sequence[str]) -> str:
    found = hash_files(folder, paths) if paths else {}
    changed = [path for path, entry in found.items() if files[path] != entry]
    return f"{changed[0]} has other content" if changed else ""


def _content_damage(folder: Path, files: Mapping[str, FileEntry]) -> str:
    changed = _changed_content(folder, files, list(files))
    if changed:
        return changed
    extra = sorted(set(list_files(folder)) - set(files) - {MANIFEST})
    if extra:
        return f"{extra[0]} is not listed in it"
    return "" if tree_digest(files) == folder.name else f"its {MANIFEST} does not match its digest"


# ---------------------------------------------------------------- damage

CLOCKS_APART_S = 600.0
"""Tolerated difference between the clocks of hosts and disk: a result this close to a good check is suspect too."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An object found damaged; `good` is the time of its last good check, 0.0 if that is not known."""

    id: str
    object: str
    problem: str
    good: float

    def __str__(self) -> str:
        known = datetime.fromtimestamp(self.good, UTC).strftime("%Y-%m-%d %H:%M UTC") if self.good else "unknown"
        return f"object {self.object[:12]}, which was found damaged ({self.problem}); last known good: {known}"


def quarantine_object(layout: StoreLayout, digest: str, problem: str) -> None:
    """Record that the object is damaged and move it into quarantine. A missing object is ignored."""
    folder = layout.object(digest)
    if not folder.exists():
        return
    name = secrets.token_hex(8)
    finding = {"object": digest, "problem": problem, "good": last_good(folder)}
    write_json(layout.damaged(digest) / f"{name}.json", finding)
    move_aside(folder, layout.quarantine)


def last_good(folder: Path) -> float:
    """Return the time of the object's last good check in seconds since 1970; 0.0 without a readable manifest."""
    return 0.0 if read_json(folder / MANIFEST) is None else (folder / MANIFEST).stat().st_mtime


def findings(layout: StoreLayout, uris: Iterable[str], *, known: Collection[str] = ()) -> list[Finding]:
    """Return all findings of damage in the objects that the uris belong to, except those whose ids are in `known`."""
    digests = dict.fromkeys(
        uri.removeprefix("store://").partition("/")[0] for uri in uris if uri.startswith("store://")
    )
    found = []
    for digest in digests:
        for path in sorted(layout.damaged(digest).glob("*.json")):
            if path.stem in known:
                continue
            table = read_json(path) or {}
            problem, good = (
                str(table.get("problem", "the record of the damage cannot be read")),
                float(table.get("good", 0.0)),
            )
            found.append(Finding(path.stem, digest, problem, good))
    return found


def suspicion(
    layout: StoreLayout, inputs: Iterable[str], *, known: Collection[str], started: str, seconds: float
) -> str:
    """Return why a result may have been computed from damaged inputs, or an empty string.

    `known` holds the ids of the findings that its attempt knew of before it read anything.
    """
    new = findings(layout, inputs, known=known)
    if not new:
        return ""
    finished = datetime.fromisoformat(started).timestamp() + seconds + CLOCKS_APART_S
    suspects = [finding for finding in new if finished > finding.good]
    return f"made from {suspects[-1]}" if suspects else ""
