"""Bind ports of 127.0.0.1 for servers that do not listen yet."""

from __future__ import annotations

import socket

from pipelines.services.health import ServiceError
from pipelines.services.home import LOOPBACK

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
PORTS_TRIED = 200
LAST_PORT = 65535


def bound_port(wanted: int) -> socket.socket:
    """Return a socket that listens at `wanted` or the next free port; close it when its server has ended for good.

    A server needs seconds before it listens, and may be restarted. Its starter binds the port and hands the socket over,
    so nobody else has the port meanwhile, whatever their state folder, TMPDIR or user.
    """
    if not 0 <= wanted <= LAST_PORT:
        raise ServiceError(f"port = {wanted}: must be from 0 to {LAST_PORT}; 0 is any free port")
    for port in range(wanted, min(wanted + PORTS_TRIED, LAST_PORT + 1)):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of its last server may linger
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError:
            listener.close()
            continue
        return listener
    raise ServiceError(
        f"port = {wanted}: this port and the {PORTS_TRIED} after it are in use; stop the programs that listen there"
    )


def port_of(listener: socket.socket) -> int:
    """Return the port at which a socket listens."""
    return int(listener.getsockname()[1])


def is_free(port: int) -> bool:
    """Return whether no process listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
