"""Copies of folders on this node, evicted by last use when they exceed `RLHF_CACHE_GIB`.

A copy has the digest of its content as its name, whether it is of an object or of unfinished work of another node.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf_core.errors import ArtifactError, ConfigError
from rlhf_core.store.layout import StoreLayout, folder_bytes, fsync_path, fsync_tree, make_read_only, remove_tree


class NodeCache:
    """Copies below `root`. A copy that a living process has read is not evicted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held: dict[str, int] = {}
        """Name of a copy -> descriptor of the lock by which this process keeps it."""
        self._threads = threading.RLock()

    def object(self, digest: str) -> Path:
        """The folder of the copy with this digest."""
        return StoreLayout(self.root).object(digest)

    @contextmanager
    def filling(self, folder: Path) -> Iterator[None]:
        """Register a copy for keeping; inside the block no other process of this node changes it."""
        self._keep(folder.name)  # first: nobody evicts it from here on
        with _locked(self.root / "cache" / f"{folder.name}.fetch", fcntl.LOCK_EX):
            yield

    def evict(self, room: float = 0.0) -> None:
        """Remove the copies with the oldest use until `room` bytes fit below the limit.

        Raises ArtifactError if the copies that running processes use do not leave enough room.
        """
        limit = cache_bytes()
        sizes = {}
        for path in (self.root / "objects").glob("*/*"):
            with suppress(FileNotFoundError):
                sizes[path] = folder_bytes(path)
        total = sum(sizes.values()) + room
        for path in sorted(sizes, key=self._last_use):
            if total <= limit:
                break
            if self._try_remove(path):
                total -= sizes[path]
        if room and total > limit:
            rule = f"{total / 2**30:.1f} GiB are needed at once, and RLHF_CACHE_GIB is {limit / 2**30:g}"
            raise ArtifactError("cache", str(self.root), rule, "set a higher RLHF_CACHE_GIB, or end other processes")

    def _last_use(self, path: Path) -> float:
        """The time of the lock of a copy, which each process that reads the copy sets."""
        with suppress(FileNotFoundError):
            return self._lock_of(path.name).stat().st_mtime
        return 0.0

    def _try_remove(self, path: Path) -> bool:
        """Remove a copy unless a living process has read it."""
        with suppress(BlockingIOError), _locked(self._lock_of(path.name), fcntl.LOCK_EX | fcntl.LOCK_NB):
            remove_tree(path)
            return True
        return False

    def _keep(self, name: str) -> None:
        """Hold a shared lock on a copy for as long as this process lives."""
        with self._threads:
            if name not in self._held:
                lock = self._lock_of(name)
                lock.parent.mkdir(parents=True, exist_ok=True)
                self._held[name] = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                fcntl.flock(self._held[name], fcntl.LOCK_SH)
                os.utime(lock)

    def _lock_of(self, name: str) -> Path:
        return self.root / "cache" / f"{name}.use"


def settle_copy(part: Path, folder: Path) -> Path:
    """Move the complete files in `part` to their read-only place, after they are on the disk."""
    fsync_tree(part)
    try:
        part.rename(folder)
    except OSError:  # another process of this node was faster
        remove_tree(part)
        return folder
    make_read_only(folder)
    fsync_path(folder.parent)
    return folder


def cache_bytes() -> float:
    """The limit in `RLHF_CACHE_GIB`. Raises ConfigError if it is not a number above 0."""
    given = os.environ.get("RLHF_CACHE_GIB", "500")
    try:
        gib = float(given)
    except ValueError:
        gib = 0.0
    if not gib > 0:  # also for NaN
        raise ConfigError("RLHF_CACHE_GIB", given, "must be a number of GiB above 0", "set it to 500, for example")
    return gib * 2**30


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold a lock of this node on a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)
