"""Find out which user is at the other end of a connection of this machine.

Linux lists the user of each socket in /proc/net/tcp while its connection is established, so a server can restrict itself
to the user who started it, and neither programs nor browsers need a password.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

CONNECTIONS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Files in which Linux lists all connections of this process's network namespace; other systems do not have them."""
ESTABLISHED = "01"
"""State code of an open connection. In other states, as after a close, the user reads 0, which is root."""

Address = tuple[str, int]


def is_own(client: Address, server: Address) -> bool:
    """Return whether this process's user made a connection; True for all without /proc/net/tcp (macOS)."""
    return not CONNECTIONS[0].exists() or user_at(client, server) == os.getuid()


def user_at(client: Address, server: Address) -> int | None:
    """Return the user id of the socket at `client` that is connected to `server`; None if there is none."""
    for path, family in zip(CONNECTIONS, (socket.AF_INET, socket.AF_INET6), strict=True):
        ends = [_spelled(client, family), _spelled(server, family), ESTABLISHED]
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            fields = line.split()
            if fields[1:4] == ends:
                return int(fields[7])
    return None


def _spelled(address: Address, family: socket.AddressFamily) -> str:
    """Return an address in the format of /proc/net/tcp, or of tcp6, which has IPv4 mapped into IPv6; "" for any other.

    >>> _spelled(("127.0.0.1", 5000), socket.AF_INET)
    '0100007F:1388'
    >>> _spelled(("::1", 5000), socket.AF_INET6)
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
