"""Notes in the folder of a checkpoint: the files of it that ranks on other nodes have uploaded."""

import json
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.store.layout import write_json

Parts = Mapping[str, tuple[int, str, str]]
"""Path inside a folder -> size, SHA-256 and owner of an uploaded file of unfinished work."""
NOTE = "elsewhere_"
"""Beginning of the name of a note."""


def note_elsewhere(folder: Path, rank: int, files: Parts) -> None:
    """Write a note into a folder: these files of it were uploaded by a rank on another node."""
    write_json(folder / f"{NOTE}{rank:05d}.json", {"files": {name: list(entry) for name, entry in files.items()}})


def parts_elsewhere(folder: Path) -> dict[str, tuple[int, str, str]]:
    """The files below `folder` that its notes name."""
    found: dict[str, tuple[int, str, str]] = {}
    for note in folder.rglob(f"{NOTE}*.json"):
        table: Mapping[str, tuple[int, str, str]] = json.loads(note.read_text(encoding="utf-8"))["files"]
        for name, (size, sha, owner) in table.items():
            found[(note.parent / name).relative_to(folder).as_posix()] = (size, sha, owner)
    return found
