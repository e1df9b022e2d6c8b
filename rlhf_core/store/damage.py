"""Record which objects were found damaged, and find the results that may have been computed from them.

Bytes that have gone bad on a disk stay bad, so everything read before a good check was right. The modification time of
an object's manifest is the time of its last good check: the manifest is written when the object is hashed, and touched
when it is hashed again. Each finding of damage is kept forever under `roots/damaged` with an id, and an attempt records
the ids that were known when it began. A result is suspect if one of its inputs was found damaged and the attempt did
not know of it, unless it finished before the last good check.

Results computed from a suspect result need no rule: if that result comes out differently now, their key changes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlhf_core.store.layout import MANIFEST, StoreLayout, move_aside, read_json, write_json

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
    """Record that the object is damaged and move it into quarantine. A missing object is ignored: nobody read it."""
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
