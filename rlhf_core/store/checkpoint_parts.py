"""Notes in the folder of a checkpoint: the files of it that ranks on other nodes have uploaded."""

import json
from collections.abc import Mapping
from pathlib import Path

from rlhf_core.store.layout import write_json

UploadedFile = tuple[int, str, str]
"""Size, SHA-256 and owner of an uploaded file of unfinished work."""
Parts = Mapping[str, UploadedFile]
"""Path inside a folder -> the uploaded file."""
NOTE = "elsewhere_"
"""Beginning of the name of a note."""


def note_elsewhere(folder: Path, rank: int, files: Parts) -> None:
    """Write a note into a folder: these files of it were uploaded by a rank on another node."""
    write_json(folder / f"{NOTE}{rank:05d}.json", {"files": dict(files)})


def parts_elsewhere(folder: Path) -> dict[str, UploadedFile]:
    """The files below `folder` that its notes name."""
    return {
        (note.parent / name).relative_to(folder).as_posix(): (size, sha, owner)
        for note in folder.rglob(f"{NOTE}*.json")
        for name, (size, sha, owner) in json.loads(note.read_text(encoding="utf-8"))["files"].items()
    }
