"""Which objects were found damaged, and which results were made from them while they may have been.

Bytes on a disk that have gone bad stay bad, so whatever was read before a good check was right. The manifest of an
object carries the time of its last good check as its time of modification: it is written when the object was hashed,
and touched when it was hashed again. What was found damaged is noted for good under `roots/damaged`, each time with an
id, and an attempt notes the ids that it knew of when it began. So a result is suspect if one of its inputs was
found damaged without its knowing, unless it was finished before the last good check.

A result of a suspect result needs no rule of its own: if that one comes out differently now, it has another key.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.store.layout import MANIFEST, StoreLayout, move_aside, read_json, write_json

CLOCKS_APART_S = 600.0
"""Clocks of two hosts, and of the disk, may differ this much: a result this near to a good check is suspect as well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An object that was found damaged; `good` is the time of its last good check, 0.0 if that is not known."""

    id: str
    object: str
    problem: str
    good: float

    def __str__(self) -> str:
        known = datetime.fromtimestamp(self.good, UTC).strftime("%Y-%m-%d %H:%M UTC") if self.good else "nobody knows"
        return f"object {self.object[:12]}, which was found damaged ({self.problem}); last good: {known}"


def quarantine_object(layout: StoreLayout, digest: str, problem: str) -> None:
    """Note that the object is damaged, then move it into quarantine. What is gone altogether was not read by anyone."""
    folder = layout.object(digest)
    if not folder.exists():
        return
    name = secrets.token_hex(8)
    finding = {"object": digest, "problem": problem, "good": last_good(folder)}
    write_json(layout.damaged(digest) / f"{name}.json", finding)
    move_aside(folder, layout.quarantine)


def last_good(folder: Path) -> float:
    """Return when the object was last known to be whole, in seconds since 1970; 0.0 without a readable manifest."""
    return 0.0 if read_json(folder / MANIFEST) is None else (folder / MANIFEST).stat().st_mtime


def findings(layout: StoreLayout, uris: Iterable[str], *, known: Collection[str] = ()) -> list[Finding]:
    """Return what was ever found damaged of the objects that the uris lie in, but for the ids that are `known`."""
    digests = dict.fromkeys(
        uri.removeprefix("store://").partition("/")[0] for uri in uris if uri.startswith("store://")
    )
    found = []
    for digest in digests:
        for path in sorted(layout.damaged(digest).glob("*.json")):
            if path.stem in known:
                continue
            table = read_json(path) or {}
            problem, good = str(table.get("problem", "its note cannot be read")), float(table.get("good", 0.0))
            found.append(Finding(path.stem, digest, problem, good))
    return found


def suspicion(
    layout: StoreLayout, inputs: Iterable[str], *, known: Collection[str], started: str, seconds: float
) -> str:
    """Return why a result may have been made from damaged inputs, or an empty text.

    `known` are the ids of the findings that its attempt knew of before it read anything.
    """
    new = findings(layout, inputs, known=known)
    if not new:
        return ""
    finished = datetime.fromisoformat(started).timestamp() + seconds + CLOCKS_APART_S
    suspects = [finding for finding in new if finished > finding.good]
    return f"made from {suspects[-1]}" if suspects else ""
