"""Nodes that share a bucket in the memory of this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
        self.delay_s = 0.0
        self.receive: Callable[[str, bytes], bytes] = lambda name, content: content

    def count(self, kind: str) -> None:
        """Count a request, which takes `delay_s` seconds."""
        self.requests[kind] += 1
        time.sleep(self.delay_s)

    def get(self, name: str, **options: Any) -> Any:
        self.count("GET")
        got = self.memory.get(name, **options)
        content = self.receive(name, bytes(got.bytes()))
        return SimpleNamespace(meta=got.meta, bytes=lambda: content, stream=lambda **_: iter([content]))

    def put(self, name: str, content: Any, **options: Any) -> Any:
        self.count("PUT")
        return self.memory.put(name, content, **options)

    def list(self, *args: Any, **options: Any) -> Iterator[Any]:
        self.count("LIST")
        options["chunk_size"] = PAGE
        for number, some in enumerate(self.memory.list(*args, **options)):
            if number:
                self.count("LIST")
            yield some

    def head(self, name: str) -> Any:
        self.count("HEAD")
        return self.memory.head(name)

    def delete(self, name: Any) -> None:
        self.count("DELETE")
        self.memory.delete(name)

    def names(self, prefix: str = "") -> Sequence[str]:
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
