"""The requests to an object server (a bucket), and their retries."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

from rlhf_core.store.protocol import Unreachable

logger = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_S, RETRY_S = 180.0, 2.0
"""How long a request is repeated while the server does not answer, and the pause between two tries."""


class ObjectServer(Protocol):
    """The requests that a store needs. Each may raise Unreachable, also after it was carried out."""

    def get(self, name: str) -> tuple[bytes, str, float]:
        """Content, version and time of the last write. Raises FileNotFoundError."""

    def put(self, name: str, content: bytes, expected: str | None) -> str:
        """Write if the name is at version `expected` (None: if it does not exist). Raises Conflict."""

    def list(self, prefix: str) -> Iterator[tuple[str, str, float, int]]:
        """Name, version, time of the last write and size of everything below a prefix. May be outdated."""

    def upload(self, name: str, path: Path) -> None:
        """Store a file."""

    def download(self, name: str, path: Path) -> None:
        """Write the content to a file. Raises FileNotFoundError."""

    def delete(self, name: str) -> None:
        """Delete unconditionally; the name may not exist."""

    def touch(self, name: str) -> float:
        """Write an empty object and return the time of the server."""


def repeat(request: Callable[[], T], patience_s: float) -> T:
    """Retry an idempotent request while the server does not answer, for `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return request()
        except Unreachable as error:
            if time.monotonic() > deadline:
                raise
            logger.warning("%s; trying again", error)
            time.sleep(min(RETRY_S, patience_s))
