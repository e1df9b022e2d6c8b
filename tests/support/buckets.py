"""Stores in a bucket for tests: in memory, or on a server that runs here."""

import os
from pathlib import Path
from typing import Any

from obstore.store import MemoryStore

from rlhf_core.store.artifacts import ArtifactStore
from rlhf_core.store.places import mirror
from rlhf_core.store.places.buckets import Bucket

URI = "s3://memory/team"


class Nodes:
    """Nodes that share a bucket in the memory of this process; each mirrors it in a folder of its own."""

    def __init__(self, folder: Path, patch: Any) -> None:
        self.folder, self._patch = folder, patch
        self.bucket = Bucket(URI, MemoryStore())
        patch.setattr(mirror, "open_bucket", lambda uri: self.bucket)

    def store(self, node: str) -> ArtifactStore:
        """Return the store as this node sees it."""
        self._patch.setenv("RLHF_CACHE", str(self.folder / node))
        return ArtifactStore(mirror.store_root(URI))


def mirror_in(store: ArtifactStore) -> mirror.Mirror:
    """Return the mirror under a store."""
    assert store._mirror is not None
    return store._mirror


def release(store: ArtifactStore) -> None:
    """Let the cache of a node remove what this process has read, as if the process had ended."""
    held = mirror_in(store)._held
    while held:
        os.close(held.popitem()[1])
