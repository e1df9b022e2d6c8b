"""Folders of this user among the temporary ones, where anybody can make a folder or a link of any name first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rlhf_core.errors import ConfigError, explain


def private_folder(path: Path) -> Path:
    """Make the folder, which none but this user may enter, and return it.

    Raises ConfigError if something of the name is there that is not this user's: what is written would go where others say.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            rule = "is not a folder of this user"
            remedy = "remove it, or set TMPDIR to a folder that is yours alone"
            raise ConfigError(explain("folder", str(path), rule, remedy)) from None
        path.chmod(0o700)  # as an earlier version, or a generous umask, left it
    return path
