"""The services of a project: started by `rlhf up`, found by `rlhf run`, stopped by `rlhf down`. All on 127.0.0.1."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from pipelines.home import LOOPBACK, Home, client_environment, quiet_environment
from pipelines.watched import START_TIMEOUT_S, Child, healthy, keep_alive, wait_for
from rlhf_core.errors import RlhfError
from rlhf_core.leases import is_gone
from rlhf_core.tracking.owner import from_tags

PREFECT_PORT = 4200
MLFLOW_PORT = 5000
FIRST_SIGN_S = 60.0
UP_TIMEOUT_S = 240.0
DOWN_TIMEOUT_S = 75.0
LAST_TIMEOUT_S = 20.0
SERVER_TIMEOUT_S = START_TIMEOUT_S
PORTS = 200

_CLAIMS: list[IO[str]] = []
"""Locked files, one per port that this process gave to a server."""


class ServiceError(RlhfError, RuntimeError):
    """A service could not be started or did not answer; names its log."""


@dataclass(frozen=True)
class Services:
    """What `rlhf up` started: the supervisor's identity, the addresses, and whether all of them answer."""

    owner: dict[str, str]
    """Which process the supervisor is, so that a recycled process id is not mistaken for it."""
    prefect_port: int
    mlflow_port: int
    ready: bool

    @property
    def pid(self) -> int:
        return int(self.owner["owner.pid"])

    @property
    def prefect_url(self) -> str:
        return f"http://{LOOPBACK}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    @property
    def health(self) -> tuple[str, str]:
        """Addresses that answer with success when the service behind them is well: Prefect's and MLflow's."""
        return f"{self.prefect_url}/api/health", f"{self.mlflow_url}/health"

    def well(self) -> bool:
        """Return whether everything was started and answers now."""
        return self.ready and all(healthy(url) for url in self.health)

    def write(self, home: Home) -> None:
        part = home.services.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(home.services)


def running(home: Home) -> Services | None:
    """Return the services of this state folder if their supervisor is alive."""
    services = _noted(home)
    return services if services is not None and alive(services.owner) else None


def _noted(home: Home) -> Services | None:
    try:
        return Services(**json.loads(home.services.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def await_end_of_last(home: Home) -> None:
    """Wait until the services of a supervisor that was killed have let go of their ports: they end with it, soon."""
    last = _noted(home)
    if last is not None:
        wait_for(lambda: is_free(last.prefect_port) and is_free(last.mlflow_port), LAST_TIMEOUT_S)


def up(home: Home, *, foreground: bool) -> Services:
    """Start Prefect, MLflow and the deployments; return when all of them answer."""
    services = running(home)
    if services is not None and services.well():
        return services
    home.make()
    command = [sys.executable, "-m", "pipelines.supervisor", str(home.root)]
    environment = os.environ | quiet_environment(home)
    if foreground:
        os.execve(sys.executable, command, environment)
    if services is None:
        with (home.logs / "supervisor.log").open("ab") as log:
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        wait_for(lambda: running(home) is not None, FIRST_SIGN_S)
    try:
        settled = wait_for(lambda: _ready(home) or running(home) is None, UP_TIMEOUT_S)
    except KeyboardInterrupt:
        down(home)
        raise
    if not settled or not _ready(home):
        raise ServiceError(
            f"rlhf up: Prefect, MLflow or the deployments did not start; read {home.logs}, then rlhf down"
        )
    services = running(home)
    assert services is not None
    return services


def _ready(home: Home) -> bool:
    services = running(home)
    return services is not None and services.well()


def down(home: Home) -> bool:
    """Stop what `up` started; return whether there was anything. A Ray that others use is left alone."""
    services = running(home)
    if services is None:
        home.services.unlink(missing_ok=True)
        return False
    os.kill(services.pid, signal.SIGTERM)
    if not wait_for(lambda: not alive(services.owner), DOWN_TIMEOUT_S):
        # The services notice that their starter is gone and end by themselves.
        os.kill(services.pid, signal.SIGKILL)
    home.services.unlink(missing_ok=True)
    return True


# ---------------------------------------------------------------- a server for one run


@dataclass
class PrivateServer:
    """A Prefect server for the length of one run, on the database that `rlhf up` uses too.

    From its first answer on it is started again, on the same port, when it dies or hangs.
    """

    child: Child
    port: int
    stopped: threading.Event

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    def wait(self) -> None:
        """Return when it answers; ServiceError if it ends or takes too long."""
        assert self.child.process is not None
        await_health(f"{self.url}/api/health", self.child.process, SERVER_TIMEOUT_S, self.child.log)
        threading.Thread(target=keep_alive, args=(self.child, self.stopped), daemon=True, name="keep-prefect").start()

    def stop(self) -> None:
        self.stopped.set()
        self.child.stop()


@contextmanager
def private_server(home: Home) -> Iterator[PrivateServer]:
    """Start a Prefect server at once, without waiting for it; it stops when the block, or this process, ends."""
    home.make()
    port = claim_port(PREFECT_PORT)
    log = home.logs / "prefect_run.log"
    log.unlink(missing_ok=True)
    environment = os.environ | client_environment(home, prefect_port=port)
    health = f"http://{LOOPBACK}:{port}/api/health"
    child = Child("the Prefect server of this run", prefect_command(port), environment, lambda: healthy(health), log)
    child.start()
    server = PrivateServer(child, port, threading.Event())
    try:
        yield server
    finally:
        server.stop()


# ---------------------------------------------------------------- commands, ports, health


def prefect_command(port: int) -> list[str]:
    """Return the command of the Prefect server: what `prefect server start` runs, without the wait for its own CLI."""
    return [
        *(sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"),
        *("--host", LOOPBACK, "--port", str(port), "--timeout-keep-alive", "5", "--log-level", "warning"),
        # A stage may hold Python's lock for a while; its process is not gone because it does not answer a ping.
        *("--ws-ping-interval", "60", "--ws-ping-timeout", "300"),
    ]


def mlflow_command(home: Home, port: int) -> list[str]:
    """Return the command of the MLflow server: one worker and no job runners (0.5 GB instead of 2.4)."""
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", home.mlflow_uri, "--artifacts-destination", str(home.mlflow_artifacts)),
    ]


def claim_port(wanted: int) -> int:
    """Return `wanted`, or the next port that nobody listens on, and keep it from others that ask this function.

    A server takes seconds before it listens: without a claim two runs that start together would choose the same port,
    and one of them would talk to the other's server until that ends. A claim ends with its process.
    """
    folder = Path(tempfile.gettempdir()) / f"rlhf-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for port in range(wanted, wanted + PORTS):
        claim = (folder / str(port)).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            claim.close()
            continue
        if is_free(port):
            _CLAIMS.append(claim)
            return port
        claim.close()
    raise ServiceError(f"port = {wanted}: this and the {PORTS} after it are taken; stop what listens there")


def is_free(port: int) -> bool:
    """Return whether nobody listens on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def await_health(url: str, process: subprocess.Popen[bytes], timeout_s: float, log: Path) -> None:
    """Return when `url` answers; ServiceError if the process ends first or the time is up."""
    deadline = time.monotonic() + timeout_s
    while not healthy(url):
        if process.poll() is not None:
            raise ServiceError(f"{url}: its process ended with status {process.returncode}; read {log}")
        if time.monotonic() > deadline:
            raise ServiceError(f"{url}: no answer after {timeout_s:.0f} s; read {log}")
        time.sleep(0.1)


def alive(owner: Mapping[str, str]) -> bool:
    """Return whether the process that `rlhf_core.tracking.owner.tags` described is still there."""
    process = from_tags(owner)
    return process is not None and not is_gone(process)
