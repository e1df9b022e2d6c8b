"""Ports of 127.0.0.1: which are free, and which a process has claimed for a server that does not listen yet."""

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

_CLAIMS: list[IO[str]] = []
"""Locked files, one per port that this process gave to a server."""


def claim_port(wanted: int) -> int:
    """Return `wanted`, or the next port that nobody listens on, and claim it, so that no other caller gets it.

    A server takes seconds before it listens: without a claim two runs that start together would choose the same port,
    and one of them would talk to the other's server until that ends. A claim ends with its process.
    """
    for port in range(wanted, wanted + PORTS_TRIED):
        claim = _claim_file(port).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            continue
        if is_free(port):
            _CLAIMS.append(claim)
            return port
        claim.close()
    raise ServiceError(f"port = {wanted}: this and the {PORTS_TRIED} after it are taken; stop what listens there")


def is_claimed(port: int) -> bool:
    """Return whether a process of rlhf has claimed the port for a server of its own."""
    with _claim_file(port).open("w") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def is_free(port: int) -> bool:
    """Return whether nobody listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _claim_file(port: int) -> Path:
    return private_folder(Path(tempfile.gettempdir()) / f"rlhf-ports-{os.getuid()}") / str(port)
