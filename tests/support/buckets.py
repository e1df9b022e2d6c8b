"""Nodes that share a bucket in the memory of this process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from obstore.store import MemoryStore

from rlhf_core.store import bucket_server, opening
from rlhf_core.store.artifacts import ArtifactStore

URI = "s3://memory/team"
PAGE = 1000
"""Entries in a response of LIST, as of S3."""


class Client:
    """A client of `obstore` in memory that counts requests and may receive other bytes than were stored."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.requests: Counter[str] = Counter()
        self.receive: Callable[[str, bytes], bytes] = lambda name, content: content

    def get(self, name: str, **options: Any) -> Any:
        self.requests["GET"] += 1
        got = self.memory.get(name, **options)
        content = self.receive(name, bytes(got.bytes()))
        return SimpleNamespace(meta=got.meta, bytes=lambda: content, stream=lambda **_: iter([content]))

    def put(self, name: str, content: Any, **options: Any) -> Any:
        self.requests["PUT"] += 1
        return self.memory.put(name, content, **options)

    def list(self, *args: Any, **options: Any) -> Iterator[Any]:
        self.requests["LIST"] += 1
        options["chunk_size"] = PAGE
        for number, some in enumerate(self.memory.list(*args, **options)):
            self.requests["LIST"] += number > 0
            yield some

    def head(self, name: str) -> Any:
        self.requests["HEAD"] += 1
        return self.memory.head(name)

    def delete(self, name: Any) -> None:
        self.requests["DELETE"] += 1
        self.memory.delete(name)

    def names(self, prefix: str = "") -> list[str]:
        """All names below a prefix."""
        return sorted(one["path"] for some in self.memory.list(prefix) for one in some)


class Nodes:
    """Nodes with separate cache folders below `folder`."""

    def __init__(self, folder: Path, patch: Any) -> None:
        self.folder, self.client, self._patch = folder, Client(), patch
        patch.setattr(bucket_server, "open_bucket", lambda uri, **_: self.client)

    def store(self, node: str) -> ArtifactStore:
        """The store as a new process on this node opens it."""
        self._patch.setenv("RLHF_CACHE", str(self.folder / node))
        opening._open_bucket_store.cache_clear()
        return ArtifactStore(opening.store_root(URI))

    def cut_power(self, node: str) -> int:
        """Empty the files in the cache of a node that were not fsynced; returns their number."""
        files = [path for path in (self.folder / node).rglob("*") if path.is_file() and path.name != "store.json"]
        for path in files:
            path.chmod(0o644)
            path.write_bytes(b"")
        return len(files)


def flip(content: bytes) -> bytes:
    """The same bytes with one wrong bit."""
    return content[:-1] + bytes([content[-1] ^ 1]) if content else content
