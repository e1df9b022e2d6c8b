"""Create private folders in a temporary directory, where anybody may have created the name or a link first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rlhf_core.errors import ConfigError, explain


def private_folder(path: Path) -> Path:
    """Create a folder that only this user may enter, and return it.

    Raises ConfigError if the name exists and is not a folder that belongs to this user, because others could redirect the writes.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            rule = "is not a folder that belongs to this user"
            remedy = "remove it, or set TMPDIR to a folder that only you can access"
            raise ConfigError(explain("folder", str(path), rule, remedy)) from None
        path.chmod(0o700)  # an earlier version, or a permissive umask, may have left it open
    return path
