"""Serve a bucket that forgets the parts of large objects, over a link of some MB/s: what a server elsewhere looks like from here.

    python -m benchmarks.sink --port 9000 --rate 50

Small objects are kept in memory, with the conditions of S3 on writes.
"""

import argparse
import re
import time
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BLOCK = 2**18
_objects: dict[str, tuple[bytes, int]] = {}
"""Path of an object -> what is kept of it, and its size."""
_arrived: dict[str, int] = {}
"""Path of an object -> bytes of its parts that have come."""
_lock = Lock()


class Link:
    """A link of so many bytes a second, which all connections share."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free = time.monotonic()
        self._lock = Lock()

    def passes(self, size: int) -> None:
        """Return when so many bytes have passed."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self.rate
            wait = self._free - time.monotonic()
        time.sleep(max(0.0, wait))


class Handler(BaseHTTPRequestHandler):
    """The part of S3's interface that the store uses."""

    protocol_version = "HTTP/1.1"
    link: Link

    @property
    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    @property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        if "partNumber" in self._query:
            self._dropped(size)
            with _lock:
                _arrived[self._path] = _arrived.get(self._path, 0) + size
            self._reply(200, {"ETag": '"part"'})
            return
        data = self.rfile.read(size)
        with _lock:
            known = _objects.get(self._path)
            wanted = self.headers.get("If-Match")
            if (self.headers.get("If-None-Match") == "*" and known) or (
                wanted and (not known or _tag(known) != wanted)
            ):
                self._reply(412)
                return
            _objects[self._path] = data, size
        self._reply(200, {"ETag": _tag((data, size))})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "uploads" in self._query:
            self._reply(
                200, body="<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
            )
        elif "uploadId" in self._query:
            with _lock:
                _objects[self._path] = data, _arrived.pop(self._path)
            body = (
                f"<CompleteMultipartUploadResult><ETag>{escape(_tag((data, 0)))}</ETag></CompleteMultipartUploadResult>"
            )
            self._reply(200, body=body)
        elif "delete" in self._query:
            keys = re.findall("<Key>(.*?)</Key>", data.decode())
            with _lock:
                for key in keys:
                    _objects.pop(f"{self._path.rstrip('/')}/{unescape(key)}", None)
            rows = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            self._reply(200, body=f"<DeleteResult>{rows}</DeleteResult>")
        else:
            self._reply(501)

    def do_GET(self) -> None:
        if "list-type" in self._query:
            self._reply(200, body=self._listed())
            return
        known = _objects.get(self._path)
        if known is None:
            self._reply(404)
            return
        headers = {"ETag": _tag(known), "Last-Modified": self.date_time_string(), "Content-Length": str(known[1])}
        self._reply(200, headers, known[0])

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        with _lock:
            _objects.pop(self._path, None)
        self._reply(204)

    def _listed(self) -> str:
        prefix = self._query.get("prefix", [""])[0]
        above = f"{self._path.rstrip('/')}/"
        with _lock:
            found = {path.removeprefix(above): one for path, one in _objects.items() if path.startswith(above + prefix)}
        at = "2026-01-01T00:00:00.000Z"
        rows = (
            f"<Contents><Key>{escape(key)}</Key><LastModified>{at}</LastModified><Size>{known[1]}</Size>"
            f"<ETag>{escape(_tag(known))}</ETag></Contents>"
            for key, known in sorted(found.items())
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"

    def _dropped(self, size: int) -> None:
        block = memoryview(bytearray(BLOCK))
        while size:
            read = self.rfile.readinto(block[: min(size, BLOCK)])  # type: ignore[attr-defined]
            if not read:
                raise ConnectionError("the client has ended in the middle of a part")
            self.link.passes(read)
            size -= read

    def _reply(self, status: int, headers: dict[str, str] | None = None, body: str | bytes = b"") -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _tag(known: tuple[bytes, int]) -> str:
    return f'"{md5(known[0]).hexdigest()}"'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rate", type=float, default=100.0, help="MB a second of the link")
    options = parser.parse_args()
    if not options.rate > 0:
        parser.error(f"--rate {options.rate}: must be above 0")
    Handler.link = Link(options.rate * 1e6)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
