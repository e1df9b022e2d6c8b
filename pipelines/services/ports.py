"""Find free ports of 127.0.0.1, and claim ports for servers that do not listen yet."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

from pipelines.services.health import ServiceError
from pipelines.services.home import LOOPBACK
from rlhf_core.processes.private_folder import private_folder

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
PORTS_TRIED = 200
LAST_PORT = 65535

_CLAIMS: dict[int, IO[str]] = {}
"""Port that this process claimed for a server -> its locked file."""


def claim_port(wanted: int) -> int:
    """Claim `wanted`, or the next free port, for this process, and return it.

    A server needs seconds before it listens. Without a claim, two runs that start together would choose the same port,
    and one of them would use the other's server until that ends. A claim ends with `release_port`, or with its process.
    """
    for port in range(wanted, min(wanted + PORTS_TRIED, LAST_PORT + 1)):
        claim = _claim_file(port).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            continue
        if is_free(port):
            _CLAIMS[port] = claim
            return port
        claim.close()
    raise ServiceError(
        f"port = {wanted}: this port and the {PORTS_TRIED} after it are in use; stop the programs that listen there"
    )


def release_port(port: int) -> None:
    """End the claim of this process to a port whose server has ended."""
    _CLAIMS.pop(port).close()


def is_claimed(port: int) -> bool:
    """Return whether an rlhf process has claimed the port for its server."""
    with _claim_file(port).open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def is_free(port: int) -> bool:
    """Return whether no process listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _claim_file(port: int) -> Path:
    return private_folder(Path(tempfile.gettempdir()) / f"rlhf-ports-{os.getuid()}") / str(port)
