"""The requests of a bucket store through `obstore`: S3 and compatible servers, Google Cloud Storage, Azure."""

import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError, ConfigError, explain
from rlhf_core.secrets.redaction import shown
from rlhf_core.store.addresses import open_bucket
from rlhf_core.store.protocol import Conflict, Unreachable, pack

FOLDER = "v2/"
"""Prefix of everything in the bucket. Programs with schema 1 neither read nor delete below it."""
_LARGE = 16 << 20  # bytes from which a file is sent in parts
_PART = 5 << 20  # the smallest part that S3 accepts; an object has at most 10,000 parts
_ONE_LARGE = threading.Lock()
"""Held while a large file is uploaded: four parts of it are in memory."""
_PASSED = "probes/passed"
PROBES = (
    "a record that exists can be made again (If-None-Match is ignored)",
    "a record can be changed from a version that it no longer has (If-Match is ignored)",
    "a record cannot be changed from its version",
    "a record does not hold what was written last",
)


class AccessRefused(ArtifactError):
    """The server denies this user the request; a retry would fail again."""


class ObstoreServer:
    """The bucket at an address such as `s3://bucket/folder`; all names lie below `prefix`."""

    def __init__(self, uri: str, prefix: str = FOLDER, *, is_first: bool = False) -> None:
        """If `is_first`, requests that fail are repeated for seconds instead of minutes."""
        self.uri, self._client, self._prefix = uri, open_bucket(uri, is_first=is_first), prefix

    def get(self, name: str) -> tuple[bytes, str, float]:
        """Fetch an object by GET."""
        with self._answering():
            got = self._client.get(self._prefix + name)
            return bytes(got.bytes()), _version(got.meta), got.meta["last_modified"].timestamp()

    def put(self, name: str, content: bytes, expected: str | None) -> str:
        """PUT with If-None-Match or If-Match, or the condition of the provider."""
        with self._answering(name, is_new=expected is None):
            mode: Any = "create" if expected is None else json.loads(expected)
            return _version(self._client.put(self._prefix + name, content, mode=mode, use_multipart=False))

    def list(self, prefix: str) -> Iterator[tuple[str, str, float, int]]:
        """LIST, 1,000 names at a time."""
        with self._answering():
            for some in self._client.list(self._prefix + prefix, chunk_size=1000):
                for one in some:
                    name = one["path"].removeprefix(self._prefix)
                    yield name, _version(one), one["last_modified"].timestamp(), int(one["size"])

    def upload(self, name: str, path: Path) -> None:
        """PUT of a file, in parts if it is large, and a HEAD that compares the size."""
        size, name = path.stat().st_size, self._prefix + name
        large = size > _LARGE
        with _ONE_LARGE if large else nullcontext(), self._answering():
            part = max(_PART, size // 9_000)
            self._client.put(name, path, use_multipart=large, chunk_size=part, max_concurrency=4)
            if int(self._client.head(name)["size"]) != size:
                raise Unreachable(explain("store", name, f"does not have {size} bytes after its upload", "try again"))

    def download(self, name: str, path: Path) -> None:
        """Fetch an object into a file by GET, in chunks."""
        with self._answering(), path.open("wb") as out:
            for chunk in self._client.get(self._prefix + name).stream(min_chunk_size=8 << 20):
                out.write(chunk)

    def delete(self, name: str) -> None:
        """DELETE."""
        with self._answering():
            try:
                self._client.delete(self._prefix + name)
            except FileNotFoundError:
                return

    def touch(self, name: str) -> float:
        """PUT and HEAD."""
        with self._answering():
            self._client.put(self._prefix + name, b"")
            return float(self._client.head(self._prefix + name)["last_modified"].timestamp())

    @contextmanager
    def _answering(self, conditional: str = "", *, is_new: bool = False) -> Iterator[None]:
        """Turn errors of the client into Conflict, AccessRefused or Unreachable."""
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            PermissionDeniedError,
            PreconditionError,
            UnauthenticatedError,
        )

        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise Conflict(conditional) from None
        except FileNotFoundError:
            if is_new:  # a new object needs its bucket alone
                rule, remedy = "there is no such bucket", "create it, or name another one"
                raise AccessRefused(explain("store", shown(self.uri), rule, remedy)) from None
            if conditional:
                raise Conflict(conditional) from None
            raise
        except BaseError as error:
            said = " ".join(str(error).split())[:300]
            if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
                rule, remedy = f"refused the request ({said})", "check the credentials and their permissions"
                raise AccessRefused(explain("store", shown(self.uri), rule, remedy)) from error
            rule, remedy = f"did not answer ({said})", "check address, credentials and network"
            raise Unreachable(explain("store", shown(self.uri), rule, remedy)) from error


def _version(meta: Any) -> str:
    """ETag only: listings do not contain the version of an object in a versioned bucket."""
    return json.dumps({"e_tag": meta["e_tag"]})


# ---------------------------------------------------------------- does the server keep its conditions?


def probe(uri: str) -> None:
    """Try the conditional puts that a store relies on, once per bucket. Raises ConfigError if the server ignores one."""
    server = ObstoreServer(uri, is_first=True)
    if any(server.list(_PASSED)):
        return
    name = f"probes/{secrets.token_hex(8)}"
    failed = _failed_probe(server, name)
    server.delete(name)
    if failed:
        rule = f"on this server {failed}, so two runs could compute the same key, or lose a result"
        remedy = (
            "use a server with conditional puts (Amazon S3, Google Cloud Storage, Azure, MinIO, SeaweedFS), or a folder"
        )
        raise ConfigError("store", uri, rule, remedy)
    server.touch(_PASSED)


def _failed_probe(server: ObstoreServer, name: str) -> str:
    """Try four conditional puts; describes the first failed condition, or returns ""."""
    one, two, three, four = (pack({"n": number}) for number in range(1, 5))
    _is_done(server, name, one, None)
    if _is_done(server, name, two, None):
        return PROBES[0]
    first = server.get(name)[1]
    if not _is_done(server, name, three, first):
        return PROBES[2]
    if _is_done(server, name, four, first):
        return PROBES[1]
    return "" if server.get(name)[0] == three else PROBES[3]


def _is_done(server: ObstoreServer, name: str, content: bytes, expected: str | None) -> bool:
    """True if the server executes a put with this condition, even if the response to a first try was lost."""
    try:
        server.put(name, content, expected)
    except Conflict:
        return server.get(name)[0] == content
    return True
