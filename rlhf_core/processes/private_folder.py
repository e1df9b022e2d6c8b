"""Create folders that only this user may enter, also in shared temporary directories.

In a shared directory, another user may create a folder with the same name first.
"""

import contextlib
import os
import stat
from pathlib import Path

from rlhf_core.errors import ConfigError


def private_folder(path: Path) -> Path:
    """Create a folder in a temporary directory that only this user may enter. The result is its path.

    Raises ConfigError if the name exists and is not a folder that belongs to this user, or if others may rename files
    and folders in that directory, because they could redirect the writes.
    """
    above = path.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        rule = f"others may rename what lies in {path.parent}, which has no sticky bit"
        raise ConfigError("folder", str(path), rule, "set TMPDIR to a folder that only you can access")
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        raise _not_ours(path) from None
    try:
        if os.fstat(folder).st_uid != os.getuid():
            raise _not_ours(path)
        os.fchmod(folder, 0o700)  # an earlier version, or a permissive umask, may have left it open
    finally:
        os.close(folder)
    return path


def keep_others_out(path: Path) -> None:
    """Take the rights of other users from a folder of this user; its group keeps them where it inherits the folder's."""
    found = path.stat()
    theirs = 0o007 if found.st_mode & stat.S_ISGID else 0o077
    if found.st_uid == os.getuid() and found.st_mode & theirs:
        path.chmod(stat.S_IMODE(found.st_mode) & ~theirs)


def _not_ours(path: Path) -> ConfigError:
    rule = "is not a folder that belongs to this user"
    return ConfigError("folder", str(path), rule, "remove it, or set TMPDIR to a folder that only you can access")
