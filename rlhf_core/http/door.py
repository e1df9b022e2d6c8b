"""The entry point of our HTTP servers: an ASGI middleware before all routes, mounted applications and WebSockets.

A request enters only if
1. `Host` names this machine, wherever the connection came over loopback. Any page in a browser can reach loopback
   through a host name of the page's own that resolves to 127.0.0.1 (DNS rebinding).
2. no foreign page sent it, be it with `Origin`, or without, as images, scripts and frames do (`Sec-Fetch-Site`).
3. it carries the server's `Authorization`; a server without one answers only the user who started it, whom Linux lists for
   each socket in /proc/net/tcp, so neither programs nor browsers of that user need a password.
Paths that a server leaves open (its health, the files of its pages) need the first two alone. Programs send neither
`Origin` nor `Sec-Fetch-Site`.

Every response forbids foreign pages to frame it. If the request has a nonce, the response proves that the server knows
the key, so a client can detect another server at the same port before it sends a secret.
"""

import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# ---------------------------------------------------------------- the user at the other end of a connection

CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Files in which Linux lists all connections of this process's network namespace; other systems do not have them."""
ESTABLISHED = "01"
"""State code of an open connection. In other states, as after a close, the user reads 0, which is root."""

Address = tuple[str, int]


def is_own(client: Address, server: Address) -> bool:
    """Whether this process's user made a connection; always True without /proc/net/tcp (macOS)."""
    return not CONNECTIONS[0].exists() or user_at(client, server) == os.getuid()


def user_at(client: Address, server: Address) -> int | None:
    """The user id of the socket at `client` that is connected to `server`; None if no such connection exists."""
    for path, family in zip(CONNECTIONS, (socket.AF_INET, socket.AF_INET6), strict=True):
        ends = [_peer_spelled(client, family), _peer_spelled(server, family), ESTABLISHED]
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            fields = line.split()
            if fields[1:4] == ends:
                return int(fields[7])
    return None


def _peer_spelled(address: Address, family: socket.AddressFamily) -> str:
    """Format an address as in /proc/net/tcp, or in tcp6, which has IPv4 mapped into IPv6; "" for any other.

    >>> _peer_spelled(("127.0.0.1", 5000), socket.AF_INET)
    '0100007F:1388'
    >>> _peer_spelled(("::1", 5000), socket.AF_INET6)
    '00000000000000000000000001000000:1388'
    """
    host, port = address
    host = host.removeprefix("::ffff:")
    try:
        packed = socket.inet_pton(family, f"::ffff:{host}" if family == socket.AF_INET6 and ":" not in host else host)
    except OSError:
        return ""
    words = struct.unpack(f"={len(packed) // 4}I", packed)  # in this machine's byte order
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"


# ---------------------------------------------------------------- door

LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "::1", socket.gethostname().lower()})
"""Allowed values of `Host`. Many systems resolve their own name to 127.0.1.1; no foreign page can have it."""
NONCE, PROOF = "x-rlhf-nonce", "x-rlhf-proof"
FRAMES = (
    (b"x-frame-options", b"SAMEORIGIN"),
    (b"content-security-policy", b"frame-ancestors 'self'"),
    (b"x-content-type-options", b"nosniff"),
)
"""Headers of every response. If a response sets another Content-Security-Policy, both count."""

OpenTo = Callable[[Scope], bool]


def nothing(scope: Scope) -> bool:
    """Leave nothing open to requests without authorization."""
    return False


def health_alone(scope: Scope) -> bool:
    """Leave `GET /health` open; its response has no content beyond the status."""
    return scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and scope["path"] == "/health"


class Door:
    """An application that answers 403 to foreign origins and host names, and 401 or 403 without authorization.

    `authorization` is the value that the header must have; "" restricts the server to the user who started it.
    `pages` lets the server's own pages in; `open_to` returns whether a request needs no authorization; `key` proves the server.
    """

    def __init__(
        self, app: ASGIApp, *, authorization: str = "", pages: bool = False, open_to: OpenTo = nothing, key: str = ""
    ) -> None:
        self._app = app
        self._authorization = authorization
        self._pages = pages
        self._open_to = open_to
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse it before its body is read."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        status, refusal = self._refusal(scope)
        if scope["type"] == "websocket":
            if refusal:
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": refusal})
            else:
                await self._app(scope, receive, send)
            return
        guarded = self._with_headers(scope, send)
        if refusal:
            from starlette.responses import JSONResponse  # slow, and clients only import names from here

            await JSONResponse({"error": refusal}, status_code=status)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        host, address = _values(scope, "host"), scope.get("server")
        refusal = refused(host, _values(scope, "origin"), loopback=_is_loopback(address), pages=self._pages)
        refusal = refusal or refused_fetch(
            *(_values(scope, f"sec-fetch-{name}") for name in ("site", "mode", "dest")), pages=self._pages
        )
        if refusal:
            return 403, refusal
        if self._open_to(scope):
            return 200, ""
        if self._authorization:
            given = _values(scope, "authorization")
            right = len(given) == 1 and hmac.compare_digest(_spelled(given[0]), _spelled(self._authorization))
            return (200, "") if right else (401, "the token is missing or wrong")
        client = scope.get("client")
        if client and address and address[1] is not None and is_own((client[0], client[1]), (address[0], address[1])):
            return 200, ""
        return 403, "this server answers only the user who started it"

    def _with_headers(self, scope: Scope, send: Send) -> Send:
        added = list(FRAMES)
        nonces, address = _values(scope, NONCE), scope.get("server")
        if nonces and self._key and address:
            added.append((PROOF.encode(), proof(self._key, nonces[0], address[1] or 0).encode()))

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message.get("headers", ()) if bytes(pair[0]).lower() != FRAMES[0][0]]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        return guarded


def proof(key: str, nonce: str, port: int) -> str:
    """The proof that a server on `port` knows `key`; it depends on the port, so it cannot be relayed."""
    return hmac.new(key.encode(), f"{nonce} at {port}".encode(), "sha256").hexdigest()


def refused(hosts: list[str], origins: list[str], *, loopback: bool = True, pages: bool = True) -> str:
    """The reason why a request with these headers is refused, or "" if it is accepted.

    >>> refused(["127.0.0.1:4200"], []), refused(["localhost:4200"], ["http://127.0.0.1:4200"])
    ('', '')
    >>> refused(["evil.example:4200"], [])
    'this server answers only requests to 127.0.0.1 and localhost'
    >>> refused(["127.0.0.1:4200"], ["https://evil.example"])
    'this server answers only requests from its own pages'
    >>> refused(["127.0.0.1:4200"], ["http://127.0.0.1:4200"], pages=False)
    'requests from web pages are not allowed'
    """
    places = [_place(f"//{host}") for host in hosts]
    if loopback and (len(places) != 1 or places[0] is None):
        return "this server answers only requests to 127.0.0.1 and localhost"
    if origins and not pages:
        return "requests from web pages are not allowed"
    if any(None in places or [_place(origin)] != places or not origin.startswith("http://") for origin in origins):
        return "this server answers only requests from its own pages"
    return ""


def refused_fetch(site: list[str], mode: list[str], dest: list[str], *, pages: bool) -> str:
    """The reason why a browser's headers of a request without `Origin` are refused, or "".

    Foreign pages may link to ours, but not embed them or load anything from them.

    >>> refused_fetch(["cross-site"], ["navigate"], ["document"], pages=True), refused_fetch([], [], [], pages=False)
    ('', '')
    >>> refused_fetch(["cross-site"], ["navigate"], ["iframe"], pages=True)
    'this server answers only requests from its own pages'
    """
    if set(site) <= {"same-origin", "none"} or (pages and (mode, dest) == (["navigate"], ["document"])):
        return ""
    return "this server answers only requests from its own pages"


def _spelled(authorization: str) -> bytes:
    """Write the scheme of a header value in lower case: `bearer` equals `Bearer` (RFC 9110, 11.1)."""
    scheme, _, credentials = authorization.partition(" ")
    return f"{scheme.lower()} {credentials.strip()}".encode()


def _values(scope: Scope, name: str) -> list[str]:
    wanted = name.encode()
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == wanted]


def _is_loopback(address: tuple[str, int | None] | None) -> bool:
    """Whether a connection was made to a loopback address; True for a socket file."""
    try:
        found = ipaddress.ip_address(address[0]) if address else None
    except ValueError:
        return True
    mapped = getattr(found, "ipv4_mapped", None)
    return found is None or (mapped or found).is_loopback


def _place(address: str) -> int | None:
    """The port of an address on this machine; None for any other address."""
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        return None
    extra = parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc
    return None if extra or parts.hostname not in LOCAL_NAMES else port or 80
