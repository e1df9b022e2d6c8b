"""The requests of a bucket store through `obstore`: S3 and servers that speak its language, Google Cloud Storage, Azure."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rlhf_core.errors import ArtifactError, explain
from rlhf_core.secrets.redaction import shown
from rlhf_core.store.places.buckets import open_bucket
from rlhf_core.store.protocol import Conflict, Unreachable

_LARGE, _PART = 16 << 20, 5 << 20
_ONE_LARGE = threading.Lock()


class Refused(ArtifactError):
    """The server does not let this user do it; the same request would fail again."""


class ObstoreServer:
    """The bucket at an address such as `s3://bucket/folder`."""

    def __init__(self, uri: str) -> None:
        self.uri, self._client = uri, open_bucket(uri).client

    def get(self, name: str) -> tuple[bytes, str, float]:
        with self._answering():
            got = self._client.get(name)
            return bytes(got.bytes()), _version(got.meta), got.meta["last_modified"].timestamp()

    def put(self, name: str, content: bytes, expected: str | None) -> str:
        with self._answering(name):
            mode: Any = (
                "create" if expected is None else {name: one for name, one in json.loads(expected).items() if one}
            )
            return _version(self._client.put(name, content, mode=mode, use_multipart=False))

    def list(self, prefix: str) -> Iterator[tuple[str, str, float, int]]:
        with self._answering():
            for some in self._client.list(prefix, chunk_size=1000):
                for one in some:
                    yield one["path"], _version(one), one["last_modified"].timestamp(), int(one["size"])

    def upload(self, name: str, path: Path) -> None:
        size = path.stat().st_size
        large = size > _LARGE
        with _ONE_LARGE if large else nullcontext(), self._answering():
            self._client.put(name, path, use_multipart=large, chunk_size=max(_PART, size // 9_000), max_concurrency=4)
            if int(self._client.head(name)["size"]) != size:
                raise Unreachable(explain("store", name, f"does not have {size} bytes after its upload", "try again"))

    def download(self, name: str, path: Path) -> None:
        with self._answering(), path.open("wb") as out:
            for chunk in self._client.get(name).stream(min_chunk_size=8 << 20):
                out.write(chunk)

    def delete(self, name: str) -> None:
        with self._answering():
            try:
                self._client.delete(name)
            except FileNotFoundError:
                return

    def touch(self, name: str) -> float:
        with self._answering():
            self._client.put(name, b"")
            return float(self._client.head(name)["last_modified"].timestamp())

    @contextmanager
    def _answering(self, conditional: str = "") -> Iterator[None]:
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
            if conditional:
                raise Conflict(conditional) from None
            raise
        except BaseError as error:
            said = " ".join(str(error).split())[:300]
            if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
                remedy = "check the credentials and what they allow"
                raise Refused(explain("store", shown(self.uri), f"refused the request ({said})", remedy)) from error
            rule = f"did not answer ({said})"
            raise Unreachable(
                explain("store", shown(self.uri), rule, "check address, credentials and network")
            ) from error


def _version(meta: Any) -> str:
    """ETag and, on Google and Azure, the generation; lists do not name the version of a versioned S3 bucket."""
    return json.dumps({"e_tag": meta["e_tag"]})
