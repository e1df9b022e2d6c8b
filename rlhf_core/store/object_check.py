"""Check an object of the store against its manifest, and set aside what was made from a damaged one.

Bytes that have gone bad on a disk stay bad, so everything read before a good check was right. The modification time of
an object's manifest is the time of its last good check: the manifest is written when the object is hashed, and touched
when it is hashed again.

Results computed from a result that was set aside need no rule: if that one comes out differently now, their key changes.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.store import attempts
from rlhf_core.store.fingerprint import FileEntry, hash_files, list_files, tree_digest
from rlhf_core.store.layout import (
    MANIFEST,
    StoreLayout,
    is_inside,
    move_aside,
    object_of,
    read_json,
    remove_record,
    write_json,
)
from rlhf_core.store.records import KeyRecord, parse_record


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
    return _content_damage(folder, files) if deep else _changed_content(folder, files, written)


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


# ---------------------------------------------------------------- quarantine

CLOCKS_APART_S = 600.0
"""Tolerated difference between the clocks of hosts and disk: a result this close to a good check is set aside, too."""


def quarantine_object(layout: StoreLayout, digest: str, problem: str) -> list[str]:
    """Move a damaged object into quarantine with all that was made from it; return the labels of those results.

    These are the results that were finished after its last good check; unfinished work that read it is marked. The caller
    holds the lock of the store. A missing object is ignored.
    """
    folder = layout.object(digest)
    if not folder.exists():
        return []
    good = last_good(folder)
    known = datetime.fromtimestamp(good, UTC).strftime("%Y-%m-%d %H:%M UTC") if good else "unknown"
    why = f"made from object {digest[:12]}, which was found damaged ({problem}); last known good: {known}"
    suspects = []
    for path in layout.keys.glob("*/*.json"):
        record, _ = parse_record(path)
        if record is not None and digest in map(object_of, record.inputs) and _finished(record) > good:
            set_aside_record(layout, record.key, why)
            suspects.append(record.label)
    for attempt in layout.attempts.glob("*"):
        attempts.mark_harmed(attempt, digest, why)
    write_json(layout.damage(digest), {"key": digest, "problem": problem}, durable=False)
    move_aside(folder, layout.quarantine)  # last: after a kill before this the damage is found again
    return suspects


def set_aside_record(layout: StoreLayout, key: str, problem: str) -> None:
    """Move the record of `key` into quarantine and record why, so that the next decision can report it."""
    if move_aside(layout.key(key), layout.quarantine) is not None:
        remove_record(layout.key(key))
        write_json(layout.damage(key), {"key": key, "problem": problem}, durable=False)


def last_good(folder: Path) -> float:
    """Return the time of the object's last good check in seconds since 1970; 0.0 without a readable manifest."""
    return 0.0 if read_json(folder / MANIFEST) is None else (folder / MANIFEST).stat().st_mtime


def _finished(record: KeyRecord) -> float:
    """Return the latest time at which a result may have been finished, in seconds since 1970."""
    return datetime.fromisoformat(record.started).timestamp() + record.seconds + CLOCKS_APART_S
