"""Restrict a loopback server to the user who started it.

MLflow's server does not authenticate its callers. Linux lists the user of the socket at the other end of a connection
in /proc/net/tcp while the connection is established, so neither clients nor browsers need a password.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Files in which Linux lists all connections of this process's network namespace; other systems do not have them."""
ESTABLISHED = "01"
"""State code of an open connection. In other states, as after a close, the user reads 0, which is root."""

Address = tuple[str, int]


class OwnUser:
    """An application that answers 403 to connections of other users; without /proc/net/tcp (macOS) it serves all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or refuse it before reading its body."""
        if (
            scope["type"] == "lifespan"
            or not CONNECTIONS[0].exists()
            or user_at(tuple(scope["client"] or ("", 0)), tuple(scope["server"])) == os.getuid()
        ):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "of another user"})
        else:
            await PlainTextResponse("this server answers only the user who started it\n", 403)(scope, receive, send)


def user_at(client: Address, server: Address) -> int | None:
    """Return the user id of the socket at `client` that is connected to `server`; None if there is none."""
    for path, family in zip(CONNECTIONS, (socket.AF_INET, socket.AF_INET6), strict=True):
        ends = [_spelled(client, family), _spelled(server, family), ESTABLISHED]
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = line.split()
            if fields[1:4] == ends:
                return int(fields[7])
    return None


def _spelled(address: Address, family: socket.AddressFamily) -> str:
    """Return an IPv4 address in the format of /proc/net/tcp, or mapped into IPv6 for tcp6; "" for any other.

    >>> _spelled(("127.0.0.1", 5000), socket.AF_INET)
    '0100007F:1388'
    """
    host, port = address
    try:
        packed = socket.inet_aton(host.removeprefix("::ffff:"))
    except OSError:
        return ""
    if family == socket.AF_INET6:
        packed = bytes(10) + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)  # in this machine's byte order
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
