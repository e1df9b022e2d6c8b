"""Distinguish the files of a user from the files of the interpreter and of installed packages."""

import sysconfig
from functools import lru_cache
from pathlib import Path


def is_users_own(path: Path) -> bool:
    """True if a file belongs neither to the interpreter nor to an installed package."""
    resolved = path.resolve()
    if {"site-packages", "dist-packages"} & set(resolved.parts):
        return False
    return not any(resolved.is_relative_to(folder) for folder in installed_folders())


@lru_cache(maxsize=1)
def installed_folders() -> tuple[Path, ...]:
    """The folders of the standard library and of installed packages."""
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(place).resolve() for place in places if place})
