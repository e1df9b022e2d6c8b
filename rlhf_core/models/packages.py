"""Find models inside installed Python packages, without torch: keys of their folders are made before engines load."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rlhf_core.errors import ConfigError, explain

PACKAGE = "package:"
"""Prefix of the path of such a model."""


def package_folder(path: str) -> Path:
    """Return the folder that `package:<python package>[/<folder>]` names. Raises ConfigError if it does not exist."""
    package, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(explain("model.path", path, "this Python package is not installed", f"pip install {package}"))
    folder = Path(next(iter(spec.submodule_search_locations))) / inside
    if not folder.is_dir():
        raise ConfigError(explain("model.path", path, f"the package has no folder {inside!r}", "check the name"))
    return folder
