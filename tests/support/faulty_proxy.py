"""A proxy before an HTTP server whose connections break: `choose` names the fault of each request."""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

BEFORE = ("reset", "503", "500")
"""Faults before the request reaches the server."""
AFTER = ("lost", "cut", "empty", "stale")
"""Faults after it: no response, half of its body, its head alone, and for a listing an old response."""
STALE_S = 3.0
_ERRORS = {"503": b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n", "500": b"HTTP/1.1 500 Internal\r\nContent-Length: 0\r\n\r\n"}  # fmt: skip


def drawn_faults(rates: Mapping[str, float], seed: float) -> Callable[[str], str]:
    """A function for `choose` that draws faults at these rates. Only listings can be stale."""
    dice = random.Random(seed)

    def choose(line: str) -> str:
        drawn = dice.choices([*rates, ""], [*rates.values(), 1.0])[0]
        return drawn if drawn != "stale" or "list-type" in line else ""

    return choose


class FaultyProxy:
    """`choose` gets the request line and returns a fault or ""."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream)
        self.choose: Callable[[str], str] = lambda line: ""
        self.struck: Counter[str] = Counter()
        self.address = ""
        self._lists: dict[str, tuple[float, bytes]] = {}

    async def serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 26)
        self.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Pass one request on; False if the connection is to be closed."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length(head))
        line = head.partition(b"\r\n")[0].decode()
        fault = self.choose(line)
        self.struck[fault] += 1
        if fault == "reset":
            writer.transport.abort()
            return False
        if fault in _ERRORS:
            writer.write(_ERRORS[fault])
            await writer.drain()
            return True
        at, old = self._lists.get(line, (0.0, b""))
        response = (
            old if fault == "stale" and time.monotonic() - at < STALE_S else await self._response(line, head + body)
        )
        sent = {"lost": 0, "cut": len(response) - _length(response) // 2 - 1, "empty": response.index(b"\r\n\r\n") + 4}
        writer.write(response[: sent.get(fault, len(response))])
        await writer.drain()
        if fault in sent:
            writer.transport.abort()
        return fault not in sent

    async def _response(self, line: str, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._upstream.hostname, self._upstream.port)
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        body = b"" if line.startswith("HEAD") else await reader.readexactly(_length(head))
        writer.close()
        if "list-type" in line:
            self._lists[line] = time.monotonic(), head + body
        return head + body


def _length(message: bytes) -> int:
    """The length of the body, by the head of a message."""
    head = message.partition(b"\r\n\r\n")[0].lower()
    fields = dict(line.split(b":", 1) for line in head.split(b"\r\n")[1:])
    return int(fields.get(b"content-length", b"0"))


@contextmanager
def faulty(upstream: str) -> Iterator[FaultyProxy]:
    """A proxy before the server at this address."""
    proxy, ready, loop = FaultyProxy(upstream), threading.Event(), asyncio.new_event_loop()
    task = loop.create_task(proxy.serve(ready))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, name="faulty proxy", daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
