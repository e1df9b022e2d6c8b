"""Start a project and find its way around: `rlhf init`, `rlhf profiles`, `rlhf schema`."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

from pipelines.cli.common import print_line
from pipelines.flows.profile import find_profile, profile_names
from pipelines.flows.profile_schema import profile_schema
from rlhf_core.errors import ConfigError

STARTER = Path(__file__).with_name("starter")
"""Folder of the files that `rlhf init` writes; in them, NAME stands for the name of the project."""
FILES = ("README.md", "profile.toml", "reward.py", "rows.jsonl")
SCHEMA_FILE = "profile.schema.json"
"""File next to a profile, named in the profile's first line, so that editors complete and describe its keys."""


def init(options: argparse.Namespace) -> None:
    """Make a folder with a profile, a reward function, twenty rows and a README; raise ConfigError if it is in use."""
    folder = Path(options.name).expanduser()
    name = folder.name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        rule = "the last part must begin with a letter or digit and have only these, '.', '_' and '-'"
        raise ConfigError("init", options.name, rule, "choose another name")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise ConfigError("init", options.name, f"cannot be made: {error}", "choose another name") from None
    if used:
        raise ConfigError("init", options.name, "exists and is not empty", "choose another name")
    for file in FILES:
        text = (STARTER / file).read_text(encoding="utf-8").replace("NAME", name)
        (folder / file).write_text(text, encoding="utf-8")
    (folder / SCHEMA_FILE).write_text(_schema_text(), encoding="utf-8")
    print_line(f"{folder}: {', '.join((*FILES, SCHEMA_FILE))}")
    print_line(f"next: cd {shlex.quote(str(folder))} && rlhf run profile.toml")


def schema(options: argparse.Namespace) -> None:
    """Print the JSON Schema of a profile."""
    sys.stdout.write(_schema_text())


def profiles(options: argparse.Namespace) -> None:
    """Print the shipped profiles, each with the first sentence of its first comment."""
    found = {name: _first_comment(find_profile(name)) for name in profile_names()}
    width = max(map(len, found))
    for name, text in found.items():
        print_line(f"{name:<{width}}  {text}")


def _schema_text() -> str:
    return f"{json.dumps(profile_schema(), indent=1)}\n"


def _first_comment(profile: Path) -> str:
    """The comment at the beginning of a profile as one line, up to the end of its first sentence."""
    lines = []
    for line in profile.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return re.split(r"(?<=[.;])\s", " ".join(lines), maxsplit=1)[0].rstrip(".;:")
