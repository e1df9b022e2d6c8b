"""Share a store with the members of a Unix group.

The folders of a shared store have the setgid bit: new files in them belong to the group. They stay writable for it,
also folders of finished objects, so that each member can repair, replace and collect files of other members. The files
of objects are read-only as everywhere.
"""

import grp
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhf_core.errors import ArtifactError

_OF_A_FOLDER = stat.S_ISGID | stat.S_IRWXG


def share(root: Path, group: str) -> None:
    """Share a store with a group. New files of all users follow. Repeat it after copying files into the store.

    Raises ArtifactError as `reaching` does, or if this user may not change files of others.
    """
    number, root = reaching(root, group), root.resolve()
    try:
        for path in _all_in(root):
            _give(path, number)
    except PermissionError as error:
        rule = f"only the owner of {error.filename} may give it to a group that they belong to"
        raise ArtifactError("store", str(root), rule, "let its owner do it, or root") from None


def reaching(root: Path, group: str) -> int:
    """Look up the number of a group; ArtifactError if it is unknown or its members cannot reach a store in `root`."""
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise ArtifactError("group", group, "there is no such group", "see `getent group`") from None
    root = root.resolve()
    for above in filter(Path.exists, root.parents):
        found = above.stat()
        entered = found.st_mode & (stat.S_IXGRP if found.st_gid == number else stat.S_IXOTH)
        if not entered:
            remedy = "choose a folder that they can reach, and name it as `store` in the profile"
            raise ArtifactError("store", str(root), f"members of {group} cannot enter {above}", remedy)
    return number


def is_shared(folder: Path) -> bool:
    """Whether new files in `folder` belong to its group, which may write there."""
    return folder.stat().st_mode & _OF_A_FOLDER == _OF_A_FOLDER


def open_to_group(root: Path) -> None:
    """Let this process, and its child processes, make files that the group of a shared store can write.

    This changes the process's umask. Private files (tokens, the state folder) are created with their own mode.
    """
    if root.is_dir() and is_shared(root):
        os.umask(os.umask(0o077) & ~stat.S_IRWXG)


def give_made(folder: Path) -> None:
    """In a shared store, give the group access to this user's files in `folder`; otherwise do nothing.

    Some libraries, such as safetensors, ignore the umask and create files for their owner alone, and files that were
    moved here kept their group.
    """
    if is_shared(folder.parent):
        group = folder.parent.stat().st_gid
        for path in _all_in(folder):
            with suppress(PermissionError):  # another user's, whose attempt this process continues
                _give(path, group)


def _all_in(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below `folder`, and `folder` itself at the end."""
    for parent, _, names in os.walk(folder, topdown=False):
        yield from (Path(parent, name) for name in names)
        yield Path(parent)


def _give(path: Path, group: int) -> None:
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return
    if found.st_gid != group:
        os.chown(path, -1, group)
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode):
        wanted = mode | _OF_A_FOLDER | stat.S_IRWXU
    else:
        wanted = mode | (mode & stat.S_IRWXU) >> 3  # the group may do what the owner may
    if wanted != mode or found.st_gid != group:
        path.chmod(wanted)
