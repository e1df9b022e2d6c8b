"""Write the files for running profiles elsewhere: `rlhf scaffold`."""

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from pipelines.cli.common import print_line
from pipelines.flows.profile import shipped
from rlhf_core.errors import ConfigError

TEMPLATES = Path(__file__).with_name("templates")
"""One folder of files per target; they are shipped in the wheel and copied unchanged."""


PLACES: Mapping[str, str] = {
    "container": "put the wheel of this version into FOLDER, then: podman build --tag rlhf FOLDER",
    "slurm": "sbatch --nodes 2 FOLDER/rlhf.sbatch tiny/full",
    "kubernetes": "fill in rlhf.env and the image in kustomization.yaml, then: kubectl apply -k FOLDER",
    "server": "install rlhf-lifecycle[server] into /opt/rlhf, then: systemd-analyze verify FOLDER/*.service",
}
"""Target -> the next command, in which FOLDER stands for the output folder."""
PINS = {"container": ("cpu.txt", "gpu.txt")}
"""Files with pinned dependencies that a target also needs."""


def scaffold_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", choices=sorted(PLACES), help="where profiles are to run")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the files")


def scaffold(options: argparse.Namespace) -> None:
    """Write the files of a target into a folder; raises ConfigError before writing any if an existing file differs."""
    place, folder = options.place, Path(options.out)
    sources = [
        *sorted((TEMPLATES / place).iterdir()),
        *(shipped("requirements") / name for name in PINS.get(place, ())),
    ]
    texts = {folder / path.name: path.read_bytes() for path in sources}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        other = [path.name for path, text in texts.items() if _is_other(path, text)]
        if other:
            rule = f"has {', '.join(other)} with other content"
            raise ConfigError("--out", options.out, rule, "choose another folder, or move it away")
        for path, text in texts.items():
            path.write_bytes(text)
    except OSError as error:
        raise ConfigError("--out", options.out, f"cannot be written: {error}", "choose another folder") from None
    print_line(f"{folder}: {', '.join(path.name for path in texts)}")
    print_line(f"next: {PLACES[place].replace('FOLDER', shlex.quote(_as_word(folder)))}")


def _is_other(path: Path, text: bytes) -> bool:
    """Whether the path is taken by a file with other content, or by a link, through which nothing is written."""
    return path.is_symlink() or (path.exists() and path.read_bytes() != text)


def _as_word(folder: Path) -> str:
    """The path as an argument that no command mistakes for an option."""
    return f"./{folder}" if str(folder).startswith("-") else str(folder)
