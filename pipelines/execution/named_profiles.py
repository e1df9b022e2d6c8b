"""Find the profile that a form names, and keep profiles by their content, for deployments that no later edit changes."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.flows.profile import PipelineConfig, find_profile, load_profile, parse, shipped_profiles, with_overrides
from pipelines.services.home import Home
from rlhf_core.errors import ConfigError
from rlhf_core.store.layout import read_json, write_text

DIGEST = re.compile(r"[0-9a-f]{12,64}")
"""A digest of a kept profile, or the beginning of one."""


def named_profile(profile: str, overrides: Sequence[str], home: Home) -> PipelineConfig:
    """Load the configuration of a shipped profile, of a file below the current folder, or of a kept one by its digest.

    Raises ConfigError for other files: who may fill in a form may not thereby read any file of this machine.
    """
    if DIGEST.fullmatch(profile):
        return parse(with_overrides(_kept(profile, home), overrides), origin=f"profile {profile}")
    if not _is_inside(Path(profile)) or not _is_inside(find_profile(profile)):
        rule = f"must be a shipped profile, a file below {Path.cwd()}, or the digest of a kept profile"
        raise ConfigError("profile", profile, rule, "move it there, or make a deployment of it: `rlhf deploy`")
    return load_profile(profile, overrides)


def keep_profile(table: dict[str, Any], digest: str, home: Home) -> None:
    """Keep the table of a profile, with all that it extends, under the digest of its configuration."""
    write_text(home.profiles / f"{digest}.json", json.dumps(table, indent=1), durable=True)


def _kept(digest: str, home: Home) -> dict[str, Any]:
    found = [table for path in home.profiles.glob(f"{digest}*.json") if (table := read_json(path)) is not None]
    if len(found) != 1:
        rule = "is the beginning of several kept profiles" if found else f"{home.profiles} keeps no such profile"
        remedy = "give more digits" if found else "keep it with `rlhf deploy`"
        raise ConfigError("profile", digest, rule, remedy)
    return found[0]


def _is_inside(path: Path) -> bool:
    """Whether a path, with its links followed, is in the current folder or among the shipped profiles."""
    try:
        real = Path(os.path.realpath(path))
    except ValueError:  # a name with a null character
        return False
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in (Path.cwd(), shipped_profiles()))
