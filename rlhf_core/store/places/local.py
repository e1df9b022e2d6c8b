"""Records in a folder that all processes see: a file each, as `write_json` writes it, changed under one lock."""

import errno
import fcntl
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlhf_core.errors import ArtifactError
from rlhf_core.store.fingerprint import sha256_text
from rlhf_core.store.layout import read_json, write_json
from rlhf_core.store.places import Conflict, Versioned

logger = logging.getLogger(__name__)

LOCK_SLOW_SECONDS = 10.0
"""Time of waiting for another process's change after which a warning is logged."""


@dataclass(frozen=True)
class LocalRecords:
    """The records of a folder, which are not durable: after a power cut nobody needs a lease. A version is that of the file."""

    has_clock: ClassVar[bool] = True
    folder: Path

    def get(self, name: str) -> Versioned | None:
        path = self.folder / name
        while True:
            before = _identity(path)
            value = read_json(path)
            if before == _identity(path):  # a record is replaced, never written to
                break
        if value is None and before is None:
            return None
        return Versioned(value or {}, f"{before}-{sha256_text(json.dumps(value))[:8]}")

    def put(self, name: str, value: Mapping[str, Any], expected: str | None) -> str:
        with alone(self.folder):
            self._check(name, expected)
            write_json(self.folder / name, value, durable=False)
            written = self.get(name)
        assert written is not None
        return written.version

    def drop(self, name: str, expected: str) -> None:
        with alone(self.folder):
            self._check(name, expected)
            (self.folder / name).unlink(missing_ok=True)

    def names(self) -> Iterator[str]:
        yield from sorted(path.name for path in self.folder.glob("*.json"))

    def age(self, name: str) -> float:
        """Compare the file's time with that of a file created now, so clocks of two hosts are never compared."""
        return disk_time(self.folder) - (self.folder / name).stat().st_mtime

    def _check(self, name: str, expected: str | None) -> None:
        found = self.get(name)
        if (None if found is None else found.version) != expected:
            raise Conflict(name)


def _identity(path: Path) -> str | None:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return f"{status.st_ino}-{status.st_mtime_ns}"


def disk_time(folder: Path) -> float:
    """Return the time by the clock of the disk that holds `folder`, which that of this host may differ from."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as probe:
        probe.write(b"now")
        probe.flush()
        os.fsync(probe.fileno())
        return Path(probe.name).stat().st_mtime


# ---------------------------------------------------------------- the lock


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of the store for a few quick changes: leases, records, pins and removals change in it alone.

    The kernel frees the lock of a process that dies. It is not reentrant. Raises ArtifactError if the disk has no locks.
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
