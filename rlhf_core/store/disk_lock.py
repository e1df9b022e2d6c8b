"""The lock and the clock of a store on a disk."""

import errno
import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.errors import ArtifactError

logger = logging.getLogger(__name__)

LOCK_SLOW_SECONDS = 10.0
"""A warning is logged after waiting this long for another process's change."""


def disk_time(folder: Path) -> float:
    """The time by the clock of the disk that holds `folder`, which may differ from the clock of this host."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as probe:
        probe.write(b"now")
        probe.flush()
        os.fsync(probe.fileno())
        return Path(probe.name).stat().st_mtime


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the store for a few quick changes.

    The kernel releases the lock of a process that dies. It is not reentrant. Raises ArtifactError if the disk has no locks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, probe = (os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for _ in range(2))
    try:
        try:
            _lock(descriptor, folder)
            with suppress(BlockingIOError):
                fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
                raise OSError(errno.ENOLCK, "a locked file can be locked again")
        except OSError as error:
            rule = f"the disk does not support file locks ({error.strerror}), so two runs could compute the same key"
            remedy = "choose a folder on another disk: set `store` in the profile, or RLHF_HOME"
            raise ArtifactError("store", str(folder.parent), rule, remedy) from error
        yield
    finally:
        os.close(probe)
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    """Take the lock. A warning names it if another process keeps it for long."""
    with suppress(BlockingIOError):
        return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    what = "%s: still waiting for another process to release the lock; if that process is suspended (Ctrl-Z), resume or end it"
    warning = threading.Timer(LOCK_SLOW_SECONDS, logger.warning, (what, folder))
    warning.daemon = True
    warning.start()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        warning.cancel()
