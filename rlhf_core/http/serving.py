"""Serve an application over HTTP with a deadline for headers and a limit on connections.

Uvicorn waits for the end of a request's headers forever, so clients that stop halfway, or send a byte a minute, would hold
connections and in the end all of them.
"""

import asyncio
import resource
import socket
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhf_core.errors import ConfigError

HEADERS_S = 20.0  # seconds from the connection, or the first byte of a further request, to the end of the headers
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST_CONNECTIONS = 1 << 16 if _FILES == resource.RLIM_INFINITY else _FILES // 2
"""Connections that are open at a time, half of the files that this process may have open; more are closed at once."""
MOST_HEADER_BYTES = 1 << 16  # of one request


class LimitedProtocol(H11Protocol):
    """Uvicorn's HTTP/1.1, which closes connections that send no whole request in time, or that are too many."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._deadline = self.loop.call_later(HEADERS_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is not self or not (self.cycle is None or self.cycle.response_complete):
            self._forget_deadline()  # a WebSocket now, or a request whose headers are complete
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def limited(app: Any, **settings: Any) -> uvicorn.Config:
    """Uvicorn's configuration of a server with these limits.

    Proxy headers that name the client are ignored, because without a proxy any client could send them.
    """
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        proxy_headers=False,
        log_level="warning",
        access_log=False,
        **settings,
    )


def serve_at(descriptor: int, app: Any, **settings: Any) -> None:
    """Serve at a socket that the parent process has bound, until SIGTERM; `app` is a factory."""
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    uvicorn.Server(limited(app, factory=True, **settings)).run(sockets=[listener])


# ---------------------------------------------------------------- body


class BodyRefused(Exception):
    """Raised for a body that is too large or too slow. `status` is the HTTP status of the response: 413 or 408."""

    def __init__(self, status: int, rule: str) -> None:
        super().__init__(rule)
        self.status = status


@dataclass(frozen=True)
class BodyLimits:
    """The limits on a request's body."""

    max_bytes: int = 32 * 2**20
    timeout_s: float = 60.0
    """Time from the headers to the last byte: a client that stops halfway must not hold its connection forever."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Read the body. Raises BodyRefused as soon as it exceeds `limits`."""
    body = bytearray()
    try:
        async with asyncio.timeout(limits.timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limits.max_bytes:
                    raise BodyRefused(413, f"a request may have at most {limits.max_bytes} bytes")
    except TimeoutError:
        raise BodyRefused(408, f"the request body did not arrive within {limits.timeout_s:g} s") from None
    return bytes(body)


def listening(host: str, port: int) -> socket.socket:
    """Open a socket that listens at an address of this machine; for a host with several addresses, at the IPv4 one."""
    try:
        family = min(found[0] for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM))
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        rule = f"no server can listen there ({error})"
        raise ConfigError("--port", f"{host}:{port}", rule, "name a port that is free, or --host") from None
