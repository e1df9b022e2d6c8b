"""Write the files with which another place runs profiles: `rlhf scaffold`."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.cli.common import console, print_line
from rlhf_core.errors import ConfigError

TEMPLATES = Path(__file__).with_name("places")
"""Folder with a folder of files for each place; they are shipped in the wheel, and copied as they are."""


@dataclass(frozen=True)
class Place:
    """What a place needs: files of its folder in `TEMPLATES`, and the next command, in which FOLDER is where they are."""

    files: tuple[str, ...]
    next: str


PLACES: Mapping[str, Place] = {
    "slurm": Place(("rlhf.sbatch",), "sbatch --nodes 2 FOLDER/rlhf.sbatch tiny/full"),
}


def scaffold(options: argparse.Namespace) -> None:
    """Write the files of a place into a folder; raise ConfigError, before any is written, if one has other content."""
    place, folder = PLACES[options.place], Path(options.out)
    texts = {folder / name: (TEMPLATES / options.place / name).read_bytes() for name in place.files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other = [path.name for path, text in texts.items() if path.exists() and path.read_bytes() != text]
        if other:
            rule = f"has {', '.join(other)} with other content"
            raise ConfigError("--out", options.out, rule, "choose another folder, or move it away")
        for path, text in texts.items():
            path.write_bytes(text)
    except OSError as error:
        raise ConfigError("--out", options.out, f"cannot be written: {error}", "choose another folder") from None
    print_line(console, f"{folder}: {', '.join(place.files)}")
    print_line(console, f"next: {place.next.replace('FOLDER', str(folder))}")
