"""Find the files that a profile names: in the profile's folder, as for `extends`, and only then in the current one."""

import logging
import re
from collections.abc import Callable, Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

from rlhf_core.schema.base import BESIDE

logger = logging.getLogger(__name__)

KEYS = ("path", "file", "files", "folders", "chat_template", "rubric_file", "include_path")
"""Keys whose texts are paths; elsewhere `file.py:name` alone is one."""
OF_USER_CODE = ("arguments", "reset_arguments", "variables")
"""Tables that are passed to the user's code unchanged."""
OF_NAMES = (
    "recipe",
    "terms",
    "agents",
    "external",
    "suites",
    "parents",
    "opponents",
    "reward_models",
    "pools",
)
"""Tables whose keys are names that the profile chooses, which may equal names of options."""
FUNCTION = re.compile(r"[^\s:]+\.py:\w+")
SUFFIXES = (".py", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".txt", ".md", ".jinja")
"""Ends of names of files, which no name of a model or data set on the Hub has."""


def relative_to_profile(tree: Any, folder: Path) -> Any:
    """Resolve the relative paths of a parsed profile against its `folder`, independent of the current folder.

    `pairs.jsonl` becomes `<folder>/./pairs.jsonl`: keys of stages contain only the part after `/./`, so they do not
    depend on the folder. A file that only the current folder has is used, with a warning.
    """
    return _with_paths(tree, lambda text: _found(text, folder))


def as_read_from(folder: Path, table: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite the relative paths of a profile that was read in the current folder, so that they hold from `folder`."""
    here = Path.cwd()
    if here == folder:
        return dict(table)
    place = here.relative_to(folder) if here.is_relative_to(folder) else here

    def moved(text: str) -> str:
        name = text.rpartition(":")[0] if FUNCTION.fullmatch(text) else text
        if not name or name.startswith(("/", "~", "package:")) or not _exists(here, name):
            return text
        beside, separator, written = text.partition(BESIDE)
        return f"{place / beside if separator else place}{BESIDE}{written if separator else text}"

    found: dict[str, Any] = _with_paths(table, moved)
    store = found.get("store") or "/"
    return found if "://" in store or store.startswith(("/", "~")) else found | {"store": str(place / store)}


def _with_paths(tree: Any, change: Callable[[str], str], key: str = "") -> Any:
    """A parsed profile whose texts that are paths are changed."""
    if isinstance(tree, Mapping):
        names = {name: key if key in OF_USER_CODE else "" if key in OF_NAMES else name for name in tree}
        return {name: _with_paths(value, change, names[name]) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_with_paths(value, change, key) for value in tree]
    is_path = isinstance(tree, str) and key not in OF_USER_CODE and (key in KEYS or FUNCTION.fullmatch(tree))
    return change(tree) if is_path else tree


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
