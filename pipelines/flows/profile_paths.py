"""Find the files that a profile names: beside the profile, as for `extends`, and only then in the current folder."""

import logging
import re
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

from rlhf_core.schema.base import BESIDE

logger = logging.getLogger(__name__)

KEYS = ("path", "file", "files", "folders", "chat_template", "rubric_file", "include_path")
"""Keys whose texts are paths; elsewhere `file.py:name` alone is one."""
OF_USER_CODE = ("arguments", "reset_arguments", "variables")
"""Tables that are handed to the user's code as they are."""
OF_NAMES = (
    "recipe",
    "terms",
    "agents",
    "external",
    "suites",
    "parents",
    "opponents",
    "reward_models",
    "rating_questions",
    "pools",
)
"""Tables whose keys are names that the profile chooses, which may be those of options."""
FUNCTION = re.compile(r"[^\s:]+\.py:\w+")
SUFFIXES = (".py", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".txt", ".md", ".jinja")
"""Ends of names of files, which no name of a model or data set on the Hub has."""


def relative_to_profile(tree: Any, folder: Path, *, key: str = "") -> Any:
    """Return a parsed profile of `folder` whose relative paths are read from there, whatever the current folder is.

    `pairs.jsonl` becomes `<folder>/./pairs.jsonl`: keys of stages have what follows `/./`, so they do not depend on the
    folder. A file that only the current folder has is used, with a warning.
    """
    if isinstance(tree, Mapping):
        names = {name: key if key in OF_USER_CODE else "" if key in OF_NAMES else name for name in tree}
        return {name: relative_to_profile(value, folder, key=names[name]) for name, value in tree.items()}
    if isinstance(tree, list):
        return [relative_to_profile(value, folder, key=key) for value in tree]
    is_path = isinstance(tree, str) and key not in OF_USER_CODE and (key in KEYS or FUNCTION.fullmatch(tree))
    return _found(tree, folder) if is_path else tree


def _found(text: str, folder: Path) -> str:
    name = text.rpartition(":")[0] if FUNCTION.fullmatch(text) else text
    if not name or name.startswith(("/", "~", "package:")):
        return text
    here = Path.cwd()
    if not _exists(folder, name):
        if _exists(here, name):
            logger.warning("%s: is not in %s, the folder of the profile; the one in %s is used", text, folder, here)
            return text
        if not name.endswith(SUFFIXES):
            return text  # the name of a model, a data set or a template, or a folder that is still to be made
    place = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"{place}{BESIDE}{text}"


def _exists(folder: Path, name: str) -> bool:
    try:
        return (folder / name).exists() or (has_magic(name) and any(folder.glob(name)))
    except OSError:  # a name too long for the file system
        return False
